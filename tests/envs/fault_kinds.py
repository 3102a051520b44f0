"""The ways in which the faulty environment breaks."""

from __future__ import annotations

import numpy as np


class TwoArgumentsError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def break_down(kind):
    """Break, or return what changes the row (observation, reward, …) that is returned."""
    if kind == "raise":
        raise TwoArgumentsError("this", "that")
    if kind == "nan_reward":
        return lambda row: row.__setitem__(1, float("nan"))
    if kind == "inf_observation":
        return lambda row: row[0].__setitem__(0, np.inf)
    if kind == "wrong_shape":
        return lambda row: row.__setitem__(0, np.zeros(5, np.float32))
    if kind == "wrong_type":
        return lambda row: row.__setitem__(1, "much")
    raise AssertionError(kind)
