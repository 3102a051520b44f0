"""A numeric history that cannot grow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, SupportsFloat


class History:
    """The last `maxlen` numbers; older ones are forgotten."""

    __slots__ = ("_values",)

    def __init__(self, maxlen: int) -> None:
        if maxlen < 1:
            raise ValueError(f"a history needs room for at least one number, not {maxlen}")
        self._values: deque[float] = deque(maxlen=maxlen)

    def append(self, value: SupportsFloat) -> None:
        """Keep a number; what it came from (a tensor, its graph) is not kept."""
        self._values.append(float(value))

    @property
    def maxlen(self) -> int:
        """How many numbers are kept at most."""
        return self._values.maxlen or 0

    @property
    def mean(self) -> float:
        """Mean of what is kept; NaN when empty."""
        return math.fsum(self._values) / len(self._values) if self._values else math.nan

    @property
    def last(self) -> float:
        """The newest number; NaN when empty."""
        return self._values[-1] if self._values else math.nan

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers, oldest first."""
        return {"values": list(self._values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the numbers back; a shorter history than the saved one keeps the newest."""
        self._values.clear()
        self._values.extend(float(value) for value in state["values"])
