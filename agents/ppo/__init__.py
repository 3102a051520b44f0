"""PPO and its variants. Read `agent.py`, then `loss.py`."""
