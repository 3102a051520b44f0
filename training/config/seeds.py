"""The seeds of a run's parts, derived from its one seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from steadyrl.training.config.settings import RunSettings


class Seeds(NamedTuple):
    """Seeds of the parts of a run; each is the same whether or not the others are used."""

    env: int
    agent: int
    evaluation: int


def derive_seeds(seed: int, rank: int = 0) -> Seeds:
    """Derive the parts' seeds from the run's seed (0 is valid too).

    Rank 0 has the seeds of a single-process run.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(rank,) if rank else ())
    return Seeds(*sequence.generate_state(len(Seeds._fields)).tolist())


def choosing_seed(run: RunSettings) -> int:
    """Return the seed whose episodes the run's evaluations play, and choose the best policy on."""
    return run.seed if run.eval.seed is None else run.eval.seed


def evaluation_seed(run: RunSettings) -> int:
    """Return the seed of the run's evaluation environments."""
    return derive_seeds(choosing_seed(run)).evaluation
