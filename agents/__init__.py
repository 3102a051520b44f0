"""Learning algorithms: DQN, PPO and what they share.

Read `dqn/agent.py` or `ppo/agent.py` first, then `learner/learner.py`.
"""
