"""The rollout: a short timeline on the training device with GAE on top. Read `buffer.py` first."""
