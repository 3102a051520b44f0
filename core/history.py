"""A numeric history that cannot grow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, SupportsFloat

from typing_extensions import override

from steadyrl.core.saved_state import Saved, real
from steadyrl.core.state import Stateful


class History(Stateful):
    """The last `maxlen` numbers."""

    def __init__(self, maxlen: int) -> None:
        if maxlen < 1:
            raise ValueError(f"a history needs maxlen of at least 1, not {maxlen}")
        self._values: deque[float] = deque(maxlen=maxlen)

    def append(self, value: SupportsFloat) -> None:
        """Append a number, converted to float: no reference to a tensor or its graph is kept."""
        self._values.append(float(value))

    @property
    def mean(self) -> float:
        """Mean of the stored numbers; NaN when empty."""
        return math.fsum(self._values) / len(self._values) if self._values else math.nan

    def mean_of_last(self, count: int) -> float:
        """Mean of the newest `count` numbers; NaN when empty."""
        newest = list(islice(reversed(self._values), count))
        return math.fsum(newest) / len(newest) if newest else math.nan

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._values)}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers; a history with a smaller maxlen keeps the newest."""
        values = Saved(state, "a history").raw("values")
        if not isinstance(values, list):
            raise ValueError(f"values: saved as {type(values).__name__}, here it is a list")
        found = [real(value) for value in values]
        self._values.clear()
        self._values.extend(found)
