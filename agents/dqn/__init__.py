"""DQN and its variants. Read `agents/replay_agent.py`, `agent.py`, `loss.py`."""
