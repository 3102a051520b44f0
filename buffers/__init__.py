"""Storage of experience: the replay buffer (off-policy) and the rollout buffer (on-policy)."""
