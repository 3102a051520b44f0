"""What a kernel's generators can consist of: compiled code looks their words up unchecked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from steadyrl.envs.kernels.mt19937 import LENGTH, PLACE, WORDS
from steadyrl.envs.kernels.pcg64 import HALF, INC_HIGH, INC_LOW, KEPT

TWISTER_WORDS = WORDS
WORD_32 = 2**32 - 1


def check_twisters(twisters: NDArray[np.uint64]) -> None:
    """Refuse Mersenne twisters [N, 625] whose next word is none of theirs."""
    for env, twister in enumerate(twisters):
        begun = bool(twister.any())  # not before the first episode
        if twister[PLACE] > LENGTH:
            raise ValueError(
                f"generators: the next word of environment {env} is {int(twister[PLACE])}, it can "
                f"be 0 to {LENGTH}"
            )
        if twister.max() > WORD_32 or (begun and not twister[:LENGTH].any()):
            raise ValueError(f"generators: the words of environment {env} are no twister's")


def check_generators(generators: NDArray[np.uint64]) -> None:
    """Refuse NumPy's default generators [N, 6] that could not have come to these words."""
    for env, words in enumerate(generators):
        begun = bool(words.any())
        if words[KEPT] > 1 or words[HALF] > WORD_32 or (begun and not words[INC_LOW] % 2):
            raise ValueError(
                f"generators: environment {env} has increment {int(words[INC_HIGH])}, "
                f"{int(words[INC_LOW])} and keeps {int(words[KEPT])}, {int(words[HALF])}: an odd "
                f"number, 0 or 1, and 0 to {WORD_32} they can be"
            )
