"""Numbers that environments report in `info` where their episodes end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_info(
    info: Mapping[str, Any],
    names: Sequence[str],
    into: NDArray[np.float32],
    say: Callable[[str], None],
) -> None:
    """Write the named numbers [M] of one environment's info; NaN for what is none."""
    for index, name in enumerate(names):
        into[index] = _number(info.get(name))
    _remark(info, names, say)


def read_infos(
    infos: Mapping[str, Any],
    names: Sequence[str],
    into: NDArray[np.float32],
    say: Callable[[str], None],
) -> None:
    """Write the named numbers [N, M] of a batch's info, which has arrays [N] and masks `_name`."""
    for index, name in enumerate(names):
        into[:, index] = np.where(infos.get(f"_{name}", True), _numbers(infos.get(name)), math.nan)
    _remark(infos, names, say)


def _numbers(values: Any) -> NDArray[np.float32]:
    try:
        return np.asarray(values, np.float32)
    except (TypeError, ValueError):
        return np.array(math.nan, np.float32)


def _number(value: Any) -> float:
    try:
        return float(value)
    except Exception:  # of a number too large, of foreign code: what is told here costs no episode
        return math.nan


def _remark(info: Mapping[str, Any], names: Sequence[str], say: Callable[[str], None]) -> None:
    for name in names:
        if name not in info:
            known = ", ".join(sorted(str(key) for key in info if str(key)[:1] != "_")) or "nothing"
            say(f"its info has no {name} where an episode ends: it has {known}")
