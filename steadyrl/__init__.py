"""SteadyRL: train DQN and PPO agents on Gymnasium environments, from the command line."""
