"""What a mirror holds: the manifests at a URL, which run they are of, and what can be removed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from steadyrl.core.errors import ExpectedError
from steadyrl.training.checkpoints.manifest import (
    LARGEST_MANIFEST,
    MANIFEST,
    Checkpoint,
    CheckpointError,
    parse_manifest,
    saved_at,
)
from steadyrl.training.checkpoints.run_directory import BEST, LAST
from steadyrl.training.checkpoints.store import retained
from steadyrl.training.config.overrides import ABOUT_THE_RUN, flatten, is_mutable
from steadyrl.training.mirror.remote import FILES, PART, RemoteFolder, checkpoints_at


class OccupiedError(ExpectedError):
    """The URL holds another run."""


class Archive(NamedTuple):
    """A checkpoint or policy in the store."""

    saved: Checkpoint | None  # None: a policy
    sha256: str  # of its manifest
    score: float | None
    files: frozenset[str]  # hashes


def archive_of(name: str, manifest: Mapping[str, Any]) -> Archive:
    """Return what a manifest at `name` describes."""
    score = manifest["metadata"].get("eval_return_mean")
    return Archive(
        saved_at(Path(name)),
        manifest["sha256"],
        score if isinstance(score, int | float) else None,
        frozenset(entry["sha256"] for entry in manifest["files"].values()),
    )


class Contents:
    """The archives of one run in the store, and the hashes of the files that are this run's."""

    def __init__(
        self, folder: RemoteFolder, config: Mapping[str, Any], *, new: bool, goes_back: bool
    ) -> None:
        """Read the manifests; OccupiedError for any of another run (`new`: for any at all).

        `goes_back`: the run leaves checkpoints later than its own, which are removed.
        """
        self._folder, self._archives, readable = folder, dict[str, Archive](), True
        self._goes_back = goes_back
        for name, text in _manifests(folder):
            if new:
                raise OccupiedError("holds a run already")
            try:
                manifest = parse_manifest(text, f"{folder.url}/{name}/{MANIFEST}")
            except CheckpointError:
                readable = False
                continue
            if _identity(manifest["metadata"].get("config")) != _identity(config):
                raise OccupiedError("holds another run")
            self._archives[name] = archive_of(name, manifest)
        # Leftovers of interrupted copies are removed too, if it is known what is none.
        self._files = set(folder.sizes()) if readable else set[str]()
        self._has_pruned = False

    def holds(self, name: str, manifest: Mapping[str, Any]) -> bool:
        """Return whether the archive `name` is the one of this manifest."""
        known = self._archives.get(name)
        return known is not None and known.sha256 == manifest["sha256"]

    def add(self, name: str, manifest: Mapping[str, Any]) -> None:
        """Note an archive that was written."""
        self._archives[name] = archive_of(name, manifest)
        self._files |= self._archives[name].files

    def validate_newest(self, newest: str) -> None:
        """Raise OccupiedError where the run went on from an earlier checkpoint than the last here.

        A machine that still has an old copy of the run must not remove what another one did since.
        """
        current = saved_at(Path(newest))
        saved = [archive.saved for archive in self._archives.values() if archive.saved]
        last = max(saved, default=None)
        if self._goes_back or self._has_pruned or last is None or current is None:
            return
        if last[:2] <= current[:2]:
            return
        raise OccupiedError(
            f"holds this run up to {last.path.name}, and here it is at {current.path.name}"
            " (resume=RUN/checkpoints/… gives up later ones)"
        )

    def prune(self, newest: str, keep: int | None) -> list[str]:
        """Remove what the local pruning would; return checkpoints that are later than `newest`.

        The first time these are of a branch that the run has left.
        """
        current = self._archives[newest].saved
        assert current is not None
        checkpoints = {a.saved: (name, a) for name, a in self._archives.items() if a.saved}
        left = [] if self._has_pruned else [saved for saved in checkpoints if saved > current]
        whole = sorted((saved for saved in checkpoints if saved not in left), reverse=True)
        scores = {saved.path: a.score for saved, (_, a) in checkpoints.items()}
        stays = retained(
            whole, {p: score for p, score in scores.items() if score is not None}, keep
        )
        for saved, (name, _) in checkpoints.items():
            if saved in left or (saved.path not in stays and saved != current):
                self._folder.remove(f"{name}/{MANIFEST}")
                del self._archives[name]
        if not self._has_pruned:
            for name in self._folder.names(FILES):
                if name.endswith(PART):  # of a copy that was killed
                    self._folder.remove(f"{FILES}/{name}")
        self._has_pruned = True
        named = frozenset[str]().union(*(a.files for a in self._archives.values()))
        for sha256 in self._files - named:
            self._folder.remove(f"{FILES}/{sha256}")
        self._files &= named
        return [saved.path.name for saved in left]


def _manifests(folder: RemoteFolder) -> Iterator[tuple[str, bytes]]:
    for name in (*(str(saved.path) for saved in checkpoints_at(folder)), LAST, BEST):
        try:
            yield name, folder.read(f"{name}/{MANIFEST}", LARGEST_MANIFEST)
        except FileNotFoundError:  # of a copy that was interrupted
            continue


def _identity(config: object) -> dict[str, Any]:
    """Return what of a configuration cannot change while a run goes on."""
    if not isinstance(config, Mapping):
        return {}
    plain = json.loads(json.dumps(dict(config), default=list))
    return {k: v for k, v in flatten(plain) if not is_mutable(k) and k not in ABOUT_THE_RUN}
