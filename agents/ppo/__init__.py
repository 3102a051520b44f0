"""PPO and its variants.

Read `agent.py`, `RolloutAgent.update`, `advantages.py`, `loss.py`, then `build.py`; the
gradient step is `agents/engine/eager.py: EagerStep`.
"""
