"""Episodes that no evaluation of training played, to score the policy that those chose."""

from __future__ import annotations

from itertools import count

import numpy as np

from steadyrl.envs.backends.single_env import episode_seed
from steadyrl.training.config.seeds import choosing_seed, derive_seeds
from steadyrl.training.config.settings import RunSettings

FRESH = 1  # marks this stream of seeds beside those of `derive_seeds`


def scoring_seed(training: RunSettings, scoring: RunSettings, *, best: bool) -> int:
    """Return the seed of the episodes that score a policy: of the run's own, or fresh ones."""
    return fresh_seed(training, scoring) if best else choosing_seed(training)


def fresh_seed(training: RunSettings, scoring: RunSettings) -> int:
    """Return a seed for `scoring` without an episode in common with evaluations of `training`.

    A policy chosen as the best of many evaluations was lucky in their episodes: its mean return on
    them is biased upwards.
    """
    chosen_on = choosing_seed(training)
    used = _episode_seeds(training, chosen_on)
    for attempt in count():
        sequence = np.random.SeedSequence(chosen_on, spawn_key=(FRESH, attempt))
        seed = int(sequence.generate_state(1)[0])
        if used.isdisjoint(_episode_seeds(scoring, seed)):
            return seed
    raise AssertionError("unreachable")


def _episode_seeds(run: RunSettings, seed: int) -> set[int]:
    """Return the reset seeds of the episodes that an evaluator with this seed plays."""
    episodes, evaluation = run.eval.episodes, derive_seeds(seed).evaluation
    envs = min(episodes, run.eval.num_envs)
    most = -(-episodes // envs)
    return {episode_seed(evaluation, env, k) for env in range(envs) for k in range(most)}
