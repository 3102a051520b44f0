"""Validation of saved random generators of kernels, whose code does not check indices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from steadyrl.envs.kernels.mt19937 import LENGTH, PLACE, WORDS
from steadyrl.envs.kernels.pcg64 import HALF, INC_HIGH, INC_LOW, KEPT

TWISTER_WORDS = WORDS
WORD_32 = 2**32 - 1


def check_twisters(twisters: NDArray[np.uint64]) -> None:
    """Raise ValueError for invalid states of Mersenne twisters [N, 625]."""
    for env, twister in enumerate(twisters):
        begun = bool(twister.any())  # zeros before the first episode
        if twister[PLACE] > LENGTH:
            raise ValueError(
                f"generators: the next word of environment {env} is {int(twister[PLACE])}, it can "
                f"be 0 to {LENGTH}"
            )
        if twister.max() > WORD_32 or (begun and not twister[:LENGTH].any()):
            raise ValueError(f"generators: environment {env} has no valid Mersenne twister state")


def check_generators(generators: NDArray[np.uint64]) -> None:
    """Raise ValueError for impossible states of NumPy's default generator [N, 6]."""
    for env, words in enumerate(generators):
        begun = bool(words.any())
        if words[KEPT] > 1 or words[HALF] > WORD_32 or (begun and not words[INC_LOW] % 2):
            raise ValueError(
                f"generators: environment {env} has increment {int(words[INC_HIGH])}, "
                f"{int(words[INC_LOW])} and keeps {int(words[KEPT])}, {int(words[HALF])}: an odd "
                f"number, 0 or 1, and 0 to {WORD_32} they can be"
            )
