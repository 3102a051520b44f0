"""Private names of a library, looked up when they are first needed.

They move between versions. Whatever uses one asks a `Gate` for it; where one is missing, the
feature built on it is off, the public way is taken, and the log says so once.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

log = logging.getLogger("steadyrl")


class Unsupported(Exception):  # noqa: N818 (not a failure: there is another way)
    """A library lacks what a faster way needs, or is not proven with it: take the public way."""


class Feature(NamedTuple):
    """What is built on private names, and what happens without them."""

    names: tuple[str, ...]  # their paths, such as torch._inductor.compile
    otherwise: str
    # Newest version of the library, such as 2.15, that it is tried with; None: any will do,
    # because a name that is there does what it says.
    newest: str | None = None


class Gate:
    """The private names of one library that are used."""

    def __init__(self, library: str, features: Mapping[str, Feature]) -> None:
        self.library, self.features = library, dict(features)
        self.version = version(library)
        self._logged: set[str] = set()

    def offers(self, feature: str) -> bool:
        """Return whether all of a feature's names are there; if not, log it once."""
        try:
            self.require(feature)
        except Unsupported as missing:
            self.log_once(missing)
            return False
        return True

    def require(self, feature: str) -> None:
        """Raise Unsupported unless all of a feature's names are there."""
        self.require_proven(feature)
        for name in self.features[feature].names:
            self._find(name, feature)

    def require_proven(self, feature: str) -> None:
        """Raise Unsupported if the library is newer than the feature is tried with."""
        _, otherwise, newest = self.features[feature]
        if newest is not None and _numbers(self.version) > _numbers(newest):
            raise Unsupported(
                f"{self.library} {self.version} is newer than {newest}, the newest that "
                f"this is tried with: {otherwise}"
            )

    def __getitem__(self, name: str) -> Any:
        """Return a private object by its path; raise Unsupported if it is missing."""
        for feature, (names, *_) in self.features.items():
            if name in names:
                return self._find(name, feature)
        raise KeyError(f"{name} is not listed")

    def log_once(self, reason: Unsupported) -> None:
        """Warn of this, once in a process."""
        text = str(reason)
        if text not in self._logged:
            self._logged.add(text)
            log.warning(text)

    def _find(self, name: str, feature: str) -> Any:
        try:
            return look_up(name)
        except (ImportError, AttributeError):
            raise Unsupported(
                f"{self.library} {self.version} has no {name}: {self.features[feature].otherwise}"
            ) from None


def look_up(path: str) -> Any:
    """Return what a path such as torch._inductor.compile names, importing modules as necessary.

    Raise ImportError or AttributeError if it is missing.
    """
    first, *rest = path.split(".")
    found, place = importlib.import_module(first), first
    for name in rest:
        place = f"{place}.{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(place)
            except ModuleNotFoundError:
                raise AttributeError(place) from None
    return found


def _numbers(text: str) -> tuple[int, int]:
    """Return major and minor version; (0, 0) for a version without numbers."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
