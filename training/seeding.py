"""One seed for the run, one generator for each of its parts; nothing global."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Seeds(NamedTuple):
    """Seeds of the parts of a run; none depends on whether another is used."""

    env: int
    agent: int
    evaluation: int


def spawn(seed: int) -> Seeds:
    """Derive the parts' seeds from the run's; 0 is a seed like any other."""
    return Seeds(*np.random.SeedSequence(seed).generate_state(len(Seeds._fields)).tolist())
