"""PPO and its variants. Read `agents/rollout_agent.py`, `agent.py`, `advantages.py`, `loss.py`."""
