"""Learning algorithms: networks, DQN, PPO."""
