"""Rollout buffer: T timesteps on the training device, and GAE. Read `buffer.py` first."""
