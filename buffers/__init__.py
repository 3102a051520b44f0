"""Where experience is stored: the replay and the rollout, one timeline each."""
