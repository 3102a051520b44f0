"""DQN and its variants.

Read `agent.py`, `agents/replay_agent.py`, `loss.py`, then `build.py`; the gradient step is
`agents/engine/eager.py: EagerStep`.
"""
