"""One seed per episode, so that any episode can be started again on its own."""

from __future__ import annotations

import numpy as np


def episode_seed(seed: int, env: int, episode: int) -> int:
    """Derive the seed of one episode of one environment."""
    return int(np.random.SeedSequence([seed, env, episode]).generate_state(1)[0])
