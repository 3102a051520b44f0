"""Validation of loaded state: type, shape, dtype and range of every value are checked before use.

Compiled code does not check indices, so an index out of range would access foreign memory. Every
part declares the range of its numbers; a value outside raises a ValueError with its key.
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
    """Allowed range of saved numbers: finite, from `least` to `most`."""

    least: float = -math.inf
    most: float = math.inf
    optional: bool = False  # None is allowed: not known yet
    finite: bool = True

    def __str__(self) -> str:
        return f"{_shown(self.least)} to {_shown(self.most)}"


FINITE = Limits()
COUNT = Limits(0, LARGEST)
ANY_WHOLE = Limits(-LARGEST - 1, LARGEST)
UNKNOWN_YET = Limits(optional=True, finite=False)


def whole(value: Any, limits: Limits = COUNT) -> int:
    """Return an int within its limits, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"saved as {type(value).__name__}, here it is int")
    if not limits.least <= value <= limits.most:
        raise ValueError(f"is {_shown(value)}, it can be {limits}")
    return value


def real(value: Any, limits: Limits = FINITE) -> float:
    """Return a float within its limits, or raise ValueError."""
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
    """Return a bool, or raise ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"saved as {type(value).__name__}, here it is bool")
    return value


def length(value: Any) -> int:
    """Return the length of a tensor's first axis; 0 for a scalar or no tensor."""
    return len(value) if getattr(value, "ndim", 0) else 0


def tensor(
    value: Any, shape: tuple[int, ...], dtype: torch.dtype | str, limits: Limits = FINITE
) -> torch.Tensor:
    """Return a tensor of this shape and dtype with all elements within the limits, or raise."""
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
    """Raise ValueError for a tensor with NaN or an element outside the limits."""
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
        """Wrap a saved state; `of` names it in error messages."""
        if not isinstance(state, Mapping):
            raise ValueError(f"{of} is saved as {type(state).__name__}, not as a mapping")
        self._state, self._of = state, of

    def __contains__(self, key: str) -> bool:
        return key in self._state

    def raw(self, key: str) -> Any:
        """Return the saved value of a key, unchecked."""
        if key not in self._state:
            raise ValueError(f"the saved state of {self._of} has no {key}")
        return self._state[key]

    def inside(self, key: str) -> Saved:
        """Return the nested state of a key."""
        return self._of_key(key, lambda value: Saved(value, f"{self._of}.{key}"))

    def whole(self, key: str, least: float = 0, most: float = LARGEST) -> int:
        """Return the int of a key."""
        return self._of_key(key, lambda value: whole(value, Limits(least, most)))

    def wholes(self, key: str, length: int, least: float, most: float) -> list[int]:
        """Return the list of `length` ints of a key."""
        limits = Limits(least, most)
        return self._of_key(
            key, lambda value: [whole(each, limits) for each in _list(value, length)]
        )

    def booleans(self, key: str, length: int) -> list[bool]:
        """Return the list of `length` bools of a key."""
        return self._of_key(key, lambda value: [boolean(each) for each in _list(value, length)])

    def real(
        self, key: str, least: float = -math.inf, most: float = math.inf, *, finite: bool = True
    ) -> float:
        """Return the float of a key."""
        return self._of_key(key, lambda value: real(value, Limits(least, most, finite=finite)))

    def boolean(self, key: str) -> bool:
        """Return the bool of a key."""
        return self._of_key(key, boolean)

    def tensor(
        self,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | str,
        least: float = -math.inf,
        most: float = math.inf,
    ) -> torch.Tensor:
        """Return the tensor of a key, of this shape and dtype."""
        limits = Limits(least, most)
        return self._of_key(key, lambda value: tensor(value, shape, dtype, limits))

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
    """Return a validated state of a NumPy generator, which itself does not check it."""
    saved = Saved(state, kind)
    if saved.raw("bit_generator") != kind:
        raise ValueError(f"saved from {_shown(saved.raw('bit_generator'))}, here it is {kind}")
    words = saved.inside("state")
    inside = {key: words.whole(key, 0, 2**128 - 1) for key in ("state", "inc")}
    if not inside["inc"] % 2:
        raise ValueError("state.inc is even: not a PCG64 state")
    return {
        "bit_generator": kind,
        "state": inside,
        "has_uint32": saved.whole("has_uint32", 0, 1),
        "uinteger": saved.whole("uinteger", 0, 2**32 - 1),
    }


def set_numpy_generator(generator: np.random.Generator, state: Any) -> None:
    """Validate a state and set it."""
    kind = type(generator.bit_generator).__name__
    if not kind.startswith("PCG64"):
        raise ValueError(f"the state of a {kind} cannot be loaded")
    generator.bit_generator.state = numpy_generator(state, kind)


def torch_generator(state: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a validated state of a torch generator.

    torch checks "words left" and "next word" separately only; their sum must fit the state.
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
            raise ValueError(f"invalid generator: {left} words left after {following}")
        if words.max() >= 2**32 or not words.any():
            raise ValueError("invalid generator: words out of range")
        kept = [*normal[:24].view("<f8").tolist(), *normal[32:36].view("<f4").tolist()]
        if not all(map(math.isfinite, kept)):
            raise ValueError("invalid generator: cached normal number is not finite")
    return checked


def _shown(value: Any) -> str:
    """Return a value as short text."""
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        # Python raises for str() of an int with thousands of digits.
        bits = value.bit_length()
        text = f"{value}" if bits <= 128 else f"{'-' if value < 0 else ''}2^{bits} or so"
    return text if len(text) <= 60 else text[:59] + "…"
