"""DQN and its variants.

Read `agents/replay_agent.py`, `loss.py`, `agent.py`, then `build.py`; the gradient step is
`agents/engine/eager.py: EagerStep`.
"""
