"""The manifest of a saved directory: sizes and SHA-256 of its files, verified on reading.

Names are checked first, then sizes, then hashes, so that a damaged or foreign directory allocates
nothing and runs nothing. No torch here: `resume` reads configurations before torch is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from steadyrl.core.errors import ExpectedError
from steadyrl.core.files import open_regular, read_regular
from steadyrl.core.safe_parsing import from_json
from steadyrl.training.checkpoints.formats import FORMAT

MANIFEST = "manifest.json"
LARGEST_MANIFEST, MOST_VALUES = 16_000_000, 1_000_000  # bytes, and values in it
PART_FILE = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}(\.[a-z]{1,12})?")
CHECKPOINT = re.compile(r"step-(\d{12})(?:-(\d{1,4}))?")
CHUNK = 1 << 20
FRESH, OLD = ".new-", ".old-"  # prefixes while a directory is replaced


class CheckpointError(ExpectedError):
    """A saved file cannot be used; the message names file and reason."""

    exit_code = 3


class ShortOfMemoryError(CheckpointError):
    """It does not fit into the free memory; an older checkpoint would lose steps for nothing."""

    exit_code = 7


class FormatError(CheckpointError):
    """Written by another version; no older checkpoint is used instead."""


class Checkpoint(NamedTuple):
    """A checkpoint directory; sorts by step, then attempt."""

    step: int
    attempt: int
    path: Path


def differences(there: Mapping[str, Any], here: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Describe which of `keys` differ between saved and current metadata; empty if none."""
    return "; ".join(
        f"{key} is {there.get(key)} there and {here[key]} here"
        for key in keys
        if there.get(key) != here[key]
    )


def saved_at(path: Path) -> Checkpoint | None:
    """Return the checkpoint of this path; None if the name is not a checkpoint's."""
    match = CHECKPOINT.fullmatch(path.name)
    return Checkpoint(int(match[1]), int(match[2] or 1), path) if match else None


def saved_below(directory: Path) -> list[Checkpoint]:
    """List checkpoint directories, newest first, valid or not."""
    found = []
    for path in directory.glob("step-*"):
        saved = saved_at(path)
        if saved is not None and path.is_dir() and not path.is_symlink():
            found.append(saved)
    return sorted(found, reverse=True)


def recover_path(path: Path) -> Path:
    """Return where the archive `path` is after an interrupted replacement."""
    if not path.name:  # the root directory is never replaced
        return path
    candidates = (path, *(path.with_name(f"{kind}{path.name}") for kind in (FRESH, OLD)))
    return next((each for each in candidates if (each / MANIFEST).is_file()), path)


def self_hash(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own hash."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def entry_of(data: bytes) -> dict[str, Any]:
    """Return a file's manifest entry."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def manifest_of(path: Path) -> dict[str, Any]:
    """Read a manifest; CheckpointError if its format, its names or its own hash are wrong."""
    source = path / MANIFEST
    try:
        text = read_regular(source, LARGEST_MANIFEST)
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error.strerror}") from None
    return parse_manifest(text, source)


def parse_manifest(text: bytes, source: object) -> dict[str, Any]:
    """Check the text of a manifest; `source` is where it is from, for errors."""
    try:
        manifest = from_json(text, most=MOST_VALUES)
        saved_as, whole = manifest["format"], manifest["sha256"] == self_hash(manifest)
        if whole and type(saved_as) is int and saved_as > 0 and saved_as != FORMAT:
            age = "a newer" if saved_as > FORMAT else "an older"
            known = f"format {str(saved_as)[:20]}, and this one reads format {FORMAT}"
            raise FormatError(f"{source}: was written by {age} version ({known}): use that version")
        files, whole = manifest["files"], whole and isinstance(manifest["metadata"], dict)
        named = all(PART_FILE.fullmatch(name) for name in files)
        entries_valid = all(_is_entry(entry) for entry in files.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{source}: is damaged") from None
    if not whole:
        raise CheckpointError(f"{source}: is damaged: it does not match its own hash")
    if type(saved_as) is not int or saved_as != FORMAT:
        raise CheckpointError(f"{source}: does not say its format")
    if not (named and entries_valid):
        raise CheckpointError(f"{source}: names files that no checkpoint has")
    found: dict[str, Any] = manifest
    return found


def manifest_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a manifest without verifying the other files."""
    metadata: dict[str, Any] = manifest_of(path)["metadata"]
    return metadata


def part_names(path: Path) -> frozenset[str]:
    """Return the names of the parts listed in a manifest."""
    return frozenset(Path(name).stem for name in manifest_of(path)["files"])


def verified_metadata(path: Path, only: Collection[str] | None = None) -> dict[str, Any]:
    """Verify sizes and hashes of all files, or of `only` some; return the metadata."""
    manifest = manifest_of(path)
    for name, entry in manifest["files"].items():
        if only is None or name in only:
            check(path / name, entry)
    metadata: dict[str, Any] = manifest["metadata"]
    return metadata


def _is_entry(entry: Mapping[str, Any]) -> bool:
    size = entry["bytes"]
    return type(size) is int and size >= 0 and isinstance(entry["sha256"], str)


def check(path: Path, entry: Mapping[str, Any], *, keep: bool = False) -> bytes:
    """Verify a file's size and hash; return its content if `keep`.

    With `keep` it is read into memory: the caller has bounded its size.
    """
    digest, content = hashlib.sha256(), b""
    with open_saved(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{path}: has {size:,} bytes instead of {entry['bytes']:,}")
        if keep:
            content = file.read(size)
            digest.update(content)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != entry["sha256"]:
        raise CheckpointError(f"{path}: is damaged: its hash is another than when it was written")
    return content


def open_saved(path: Path) -> BinaryIO:
    """Open a regular file for reading; links, pipes and devices are refused."""
    try:
        return os.fdopen(open_regular(path), "rb")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
