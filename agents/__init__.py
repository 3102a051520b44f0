"""Learning algorithms: DQN, PPO and what they share. Read `dqn/agent.py` or `ppo/agent.py`, then `learner/learner.py`."""
