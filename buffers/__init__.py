"""Where experience is kept: the replay and the rollout."""
