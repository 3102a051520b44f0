"""Saved state is what a file says it is: every value is looked at before anything is led by it.

Compiled code looks nothing up twice: a place out of range would be read from memory of others. So
each part says what its numbers may be, and what lies outside is a ValueError that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

Read = TypeVar("Read")

LARGEST = 2**63 - 1
LARGEST_SEED = 2**128
MERSENNE_WORDS = 624


class Limits(NamedTuple):
    """What saved numbers may be, one by one: finite, and from `least` to `most`."""

    least: float = -math.inf
    most: float = math.inf
    optional: bool = False  # None stands for a number that is not known yet
    finite: bool = True

    def __str__(self) -> str:
        return f"{_shown(self.least)} to {_shown(self.most)}"


FINITE = Limits()
COUNT = Limits(0, LARGEST)
ANY_WHOLE = Limits(-LARGEST - 1, LARGEST)
UNKNOWN_YET = Limits(optional=True, finite=False)


def whole(value: Any, limits: Limits = COUNT) -> int:
    """Return a whole number within its limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"saved as {type(value).__name__}, here it is int")
    if not limits.least <= value <= limits.most:
        raise ValueError(f"is {_shown(value)}, it can be {limits}")
    return value


def real(value: Any, limits: Limits = FINITE) -> float:
    """Return a number within its limits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"saved as {type(value).__name__}, here it is float")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not limits.finite and not math.isfinite(number):
        return number
    if not (limits.least <= number <= limits.most and math.isfinite(number)):
        raise ValueError(f"is {_shown(value)}, it can be {limits}")
    return number


def boolean(value: Any) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise ValueError(f"saved as {type(value).__name__}, here it is bool")
    return value


def length(value: Any) -> int:
    """Return how long the first axis of a tensor is; 0 for what has none."""
    return len(value) if getattr(value, "ndim", 0) else 0


def tensor(
    value: Any, shape: tuple[int, ...], dtype: torch.dtype | str, limits: Limits = FINITE
) -> torch.Tensor:
    """Return a tensor of this shape and type, all of whose numbers are within their limits."""
    import torch  # here, so that a configuration is checked without it

    found = list(value.shape) if isinstance(value, torch.Tensor) else ["not a tensor"]
    if found != list(shape):
        raise ValueError(f"saved with shape {found}, here it is {list(shape)}")
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if value.dtype != dtype:
        raise ValueError(f"saved as {value.dtype}, here it is {dtype}")
    check_limits(value, limits)
    checked: torch.Tensor = value
    return checked


def check_limits(values: torch.Tensor, limits: Limits) -> None:
    """Refuse a tensor with a number that is none, or lies outside of the limits."""
    import torch

    if values.dtype == torch.bool:  # whose bytes are 0 or 1
        wrong = values.detach().cpu().contiguous().view(torch.uint8) > 1
    elif values.is_floating_point():
        wrong = values.isnan() if not limits.finite else ~values.isfinite()
        wrong |= (values < limits.least) | (values > limits.most)
    else:
        wrong = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
        information = torch.iinfo(values.dtype)
        if limits.least > information.min:
            wrong |= values < limits.least
        if limits.most < information.max:
            wrong |= values > limits.most
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        number = values[tuple(place)].item()
        raise ValueError(f"holds {_shown(number)} at {place}, each can be {limits}")


class Saved:
    """A saved mapping, whose values are taken out by name and kind."""

    def __init__(self, state: Any, of: str) -> None:
        """Take the state of what is called `of`."""
        if not isinstance(state, Mapping):
            raise ValueError(f"{of} is saved as {type(state).__name__}, not as a mapping")
        self._state, self._of = state, of

    def __contains__(self, key: str) -> bool:
        return key in self._state

    def raw(self, key: str) -> Any:
        """Return what is saved under a key, whatever it is."""
        if key not in self._state:
            raise ValueError(f"the saved state of {self._of} has no {key}")
        return self._state[key]

    def inside(self, key: str) -> Saved:
        """Return the mapping under a key."""
        return self._of_key(key, lambda value: Saved(value, f"{self._of}.{key}"))

    def whole(self, key: str, least: float = 0, most: float = LARGEST) -> int:
        """Return the whole number under a key."""
        return self._of_key(key, lambda value: whole(value, Limits(least, most)))

    def wholes(self, key: str, length: int, least: float = 0, most: float = LARGEST) -> list[int]:
        """Return so many whole numbers under a key."""
        limits = Limits(least, most)
        return self._of_key(
            key, lambda value: [whole(each, limits) for each in _list(value, length)]
        )

    def booleans(self, key: str, length: int) -> list[bool]:
        """Return so many booleans under a key."""
        return self._of_key(key, lambda value: [boolean(each) for each in _list(value, length)])

    def real(self, key: str, least: float = -math.inf, most: float = math.inf) -> float:
        """Return the number under a key."""
        return self._of_key(key, lambda value: real(value, Limits(least, most)))

    def boolean(self, key: str) -> bool:
        """Return the boolean under a key."""
        return self._of_key(key, boolean)

    def tensor(
        self,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | str,
        least: float = -math.inf,
        most: float = math.inf,
    ) -> torch.Tensor:
        """Return the tensor of this shape and type under a key."""
        limits = Limits(least, most)
        return self._of_key(key, lambda value: tensor(value, shape, dtype, limits))

    def draws(self, key: str) -> Any:
        """Return the state of a generator of NumPy's under a key."""
        return self._of_key(key, numpy_generator)

    def _of_key(self, key: str, read: Callable[[Any], Read]) -> Read:
        value = self.raw(key)
        try:
            return read(value)
        except ValueError as error:
            raise ValueError(f"{self._of}.{key}: {error}") from None


def _list(value: Any, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        found = f"{len(value)} of them" if isinstance(value, list) else type(value).__name__
        raise ValueError(f"saved as {found}, here it is a list of {length}")
    return value


def numpy_generator(state: Any, kind: str = "PCG64") -> dict[str, Any]:
    """Return the state of a generator of NumPy's, which trusts what it is given."""
    saved = Saved(state, kind)
    if saved.raw("bit_generator") != kind:
        raise ValueError(f"saved from {_shown(saved.raw('bit_generator'))}, here it is {kind}")
    words = saved.inside("state")
    inside = {key: words.whole(key, 0, 2**128 - 1) for key in ("state", "inc")}
    if not inside["inc"] % 2:
        raise ValueError("state.inc is even: it draws from nothing")
    return {
        "bit_generator": kind,
        "state": inside,
        "has_uint32": saved.whole("has_uint32", 0, 1),
        "uinteger": saved.whole("uinteger", 0, 2**32 - 1),
    }


def set_numpy_generator(generator: np.random.Generator, state: Any) -> None:
    """Put a checked state back."""
    kind = type(generator.bit_generator).__name__
    if not kind.startswith("PCG64"):
        raise ValueError(f"the state of a {kind} is none that is saved")
    generator.bit_generator.state = numpy_generator(state, kind)


def torch_generator(state: Any, like: torch.Tensor) -> torch.Tensor:
    """Return the state of a generator of torch's, which looks at its two places one by one only.

    They are how many words are left, and which comes next: together they are at most all of them.
    """
    import torch

    checked = tensor(state, tuple(like.shape), like.dtype).contiguous()
    if checked.dtype == torch.uint8 and len(checked) == 5056:  # a Mersenne twister on the host
        given = checked.numpy()
        left, seeded = given[8:16].view("<i4").tolist()
        following = int(given[16:24].view("<u8")[0])
        words = given[24 : 24 + 8 * MERSENNE_WORDS].view("<u8")
        normal = given[24 + 8 * MERSENNE_WORDS :]
        flags = int(normal[24:28].view("<i4")[0]), int(normal[36])
        fits = 1 <= left <= MERSENNE_WORDS and seeded == 1 and following <= MERSENNE_WORDS
        if not fits or left + following > MERSENNE_WORDS + 1 or not {*flags} <= {0, 1}:
            raise ValueError(f"a generator with {left} words left after {following} is none")
        if words.max() >= 2**32 or not words.any():
            raise ValueError("a generator with words like these is none")
        kept = [*normal[:24].view("<f8").tolist(), *normal[32:36].view("<f4").tolist()]
        if not all(map(math.isfinite, kept)):
            raise ValueError("a generator keeps a number that is none")
    return checked


def _shown(value: Any) -> str:
    """Return a value in few characters, whoever it comes from."""
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        # Python refuses to write out what has thousands of digits.
        bits = value.bit_length()
        text = f"{value}" if bits <= 128 else f"{'-' if value < 0 else ''}2^{bits} or so"
    return text if len(text) <= 60 else text[:59] + "…"
