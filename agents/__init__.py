"""Learning algorithms: DQN, PPO and what they share.

Read `replay_agent.py` with `dqn/loss.py`, or `rollout_agent.py` with `ppo/agent.py`; then
`learner/learner.py` and the gradient step in `engine/eager.py`.
"""
