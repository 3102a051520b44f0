"""Learning algorithms: DQN, PPO and what they share.

Read `dqn/agent.py` with its base `replay_agent.py`, or `ppo/agent.py` with `rollout_agent.py`; then
`learner/learner.py` and the gradient step in `engine/eager.py`.
"""
