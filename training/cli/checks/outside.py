"""Observations outside of their space: why they are, and whether training takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.core.errors import SettingError, one_line
from steadyrl.envs.encoding.spaces import observation_encoder, parts_of
from steadyrl.envs.settings import ImageSettings
from steadyrl.envs.types import Encoder
from steadyrl.training.cli.checks.isolated import FAULT, NOTE


class Observed:
    """Counts the observations of random play, and those outside of their space.

    Training uses vectors beyond their bounds, and all of another type, as they are; images and
    bytes are scaled by their bounds.
    """

    def __init__(self, space: spaces.Space[Any], images: ImageSettings) -> None:
        self._space = space
        self._encoder: Encoder | None = None
        # The check `encoding` reports a space that training refuses.
        with suppress(ValueError, SettingError):
            self._encoder = observation_encoder(space, images)
        self._seen = 0
        self._taken: list[str] = []  # why each is outside
        self._refused: list[str] = []

    def look(self, observation: Any) -> None:
        """Count an observation."""
        self._seen += 1
        if not self._space.contains(observation):
            found = self._taken if self._is_taken(observation) else self._refused
            found.append(outside_of(self._space, observation))

    def findings(self) -> Iterator[tuple[str, str]]:
        """Yield what was outside: a fault if training refuses or scales it, else a note."""
        many = f"of {self._seen} observations are outside of the observation space"
        if self._refused:
            yield FAULT, f"{len(self._refused)} {many}: {self._refused[0]}"
        if self._taken:
            yield NOTE, f"{len(self._taken)} {many}: {self._taken[0]} (training takes them)"

    def _is_taken(self, observation: Any) -> bool:
        encoder = self._encoder
        if encoder is None:
            return False
        if encoder.limits is not None:
            beyond = _beyond(self._space, observation)
            if beyond is None or len(beyond):
                return False
        with suppress(TypeError, ValueError, LookupError):
            encoder.write(observation, np.zeros(encoder.shape, encoder.dtype))
            return True
        return False


def outside_of(space: spaces.Space[Any], observation: Any, name: str = "it") -> str:
    """Return why an observation is outside of its space, in the first such part; "" if it is not.

    Gymnasium counts a wider dtype as outside, too.
    """
    if space.contains(observation):
        return ""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in parts_of(space):
            with suppress(LookupError, TypeError):
                if wrong := outside_of(part, observation[key], repr(key)):
                    return wrong
        return f"{name} is {_short(observation)}, its space {_short(space)}"
    values, beyond = np.asarray(observation), _beyond(space, observation)
    if beyond is None:
        return f"{name} is {_short(observation)}, its space {_short(space)}"
    assert isinstance(space, spaces.Box)
    if not len(beyond):
        return f"{name} is {values.dtype}, its space {space.dtype}"
    at = tuple(beyond[0].tolist())
    bounds = f"{space.low[at]} to {space.high[at]}"
    return f"{name} has {values[at]} at {list(at)}, its space {bounds}"


def _beyond(space: spaces.Space[Any], observation: Any) -> NDArray[np.int64] | None:
    """Return where an observation lies beyond its bounds; None if it does not fit the space."""
    values = np.asarray(observation)
    fits = isinstance(space, spaces.Box) and values.shape == space.shape
    if not (fits and values.dtype.kind in "fiub"):
        return None
    assert isinstance(space, spaces.Box)
    return np.argwhere(~((values >= space.low) & (values <= space.high)))


def _short(shown: Any) -> str:
    return one_line(repr(shown))[:80]
