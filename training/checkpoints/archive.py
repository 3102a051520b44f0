"""Write and read a directory of parts (safetensors and JSON) atomically.

Written under a temporary name, every file fsynced, the manifest last, then renamed to an unused
name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.numpy import save as save_arrays
from safetensors.torch import load, save
from torch import Tensor

from steadyrl.core.errors import one_line
from steadyrl.core.files import Files
from steadyrl.core.safe_parsing import from_json
from steadyrl.memory.budget import available_bytes
from steadyrl.memory.process import readable
from steadyrl.training.checkpoints.formats import FORMAT
from steadyrl.training.checkpoints.manifest import (
    FRESH,
    MANIFEST,
    OLD,
    CheckpointError,
    ShortOfMemoryError,
    check,
    entry_of,
    manifest_of,
    open_saved,
    recover_path,
    self_hash,
)
from steadyrl.training.checkpoints.plain import LONGEST_DOCUMENT, from_document, to_document

LARGEST_HEADER = 10_000_000  # bytes of a safetensors header
COPIES = 2  # of a file in memory while it is loaded
WORTH_A_LOOK = 64_000_000  # bytes; below, reading is faster than asking for free memory
TEMPORARY = ".writing-"


class Existing(NamedTuple):
    """A part stored in another archive, to be hard-linked."""

    archive: Path
    part: str


def write_archive(
    files: Files,
    path: Path,
    parts: Iterable[tuple[str, Any]],
    metadata: Mapping[str, Any],
    others: Callable[[], Mapping[str, Any]] | None = None,
) -> frozenset[str]:
    """Write parts (name, plain state) and `metadata` (plain) to the new directory `path`.

    Return the names of files that are not hard links. Parts are consumed one by one, so that they
    need not fit into memory together. `others` returns the manifest entries that other ranks have
    written into the temporary directory, which exists then.
    """
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        if others is None:
            files.remove(temporary)
            files.make_directory(temporary)
        try:
            linked, written = write_parts(files, temporary, parts)
        finally:
            entries = {} if others is None else dict(others())
        manifest: dict[str, Any] = {"format": FORMAT, "metadata": dict(metadata)}
        manifest["files"] = linked | written | entries
        manifest["sha256"] = self_hash(manifest)
        files.write(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        files.sync_directory(temporary)
        files.rename(temporary, path)
    except OSError:
        with suppress(OSError):  # a smaller file may still fit on a full disk
            files.remove(temporary)
        raise
    files.sync_directory(path.parent)
    return frozenset(written)


def write_parts(
    files: Files, temporary: Path, parts: Iterable[tuple[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write parts into a directory; return manifest entries of linked and of new files."""
    linked: dict[str, Any] = {}
    written: dict[str, Any] = {}
    known: dict[Path, Mapping[str, Any]] = {}  # manifests read once, not for each of 1,000 parts
    for part, state in parts:
        if isinstance(state, Existing):
            if state.archive not in known:
                known[state.archive] = manifest_of(state.archive)["files"]
            linked |= _link(files, temporary, part, state, known[state.archive])
        else:
            written |= _write(files, temporary, part, state)
    return linked, written


def _write(files: Files, directory: Path, part: str, state: Any) -> dict[str, Any]:
    document, tensors = to_document(state)
    contents = {f"{part}.json": document}
    if tensors:
        contents[f"{part}.safetensors"] = _to_bytes(tensors)
    entries: dict[str, Any] = {}
    for name, data in contents.items():
        files.write(directory / name, data)
        entries[name] = entry_of(data)
    return entries


def _to_bytes(tensors: dict[str, Tensor]) -> bytes:
    """Return tensors in the format of safetensors.

    Its own function for tensors makes a ctypes array type for every size, which are never freed.
    """
    try:
        return save_arrays({name: each.numpy() for name, each in tensors.items()})
    except TypeError:  # NumPy has no bfloat16
        return save(tensors)


def _link(
    files: Files, directory: Path, part: str, existing: Existing, known: Mapping[str, Any]
) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for suffix in (".json", ".safetensors"):
        source = existing.part + suffix
        if source in known:
            files.link(existing.archive / source, directory / (part + suffix))
            entries[part + suffix] = known[source]
    return entries


def replace_archive(
    files: Files, path: Path, parts: Iterable[tuple[str, Any]], metadata: Mapping[str, Any]
) -> None:
    """Replace an archive; `recover_path` finds the old or the new one at any moment."""
    fresh, old = (path.with_name(f"{kind}{path.name}") for kind in (FRESH, OLD))
    files.remove(fresh)
    write_archive(files, fresh, parts, metadata)
    if path.exists():
        files.remove(old)
        files.rename(path, old)
    files.rename(fresh, path)
    files.sync_directory(path.parent)
    files.remove(old)


def finish_replacing(files: Files, path: Path) -> None:
    """Complete an interrupted replacement; remove partial writes."""
    there = recover_path(path)
    if there != path and (there / MANIFEST).is_file():
        files.remove(path)
        files.rename(there, path)
        files.sync_directory(path.parent)
    for kind in (TEMPORARY + FRESH, FRESH, OLD):
        files.remove(path.with_name(f"{kind}{path.name}"))


def remove_unfinished(files: Files, directory: Path) -> None:
    """Remove partial writes of a killed process."""
    for path in directory.glob(TEMPORARY + "*"):
        files.remove(path)


def most_agent_bytes(nbytes: int) -> int:
    """Return the bytes that a saved agent may have whose network, or state when new, has `nbytes`.

    Optimisers allocate their moments at the first step.
    """
    return 8 * nbytes + 16_000_000


def read_part(
    path: Path, part: str, *, most: int | None = None, files: Mapping[str, Any] | None = None
) -> Any:
    """Verify and load one part; `files`: the manifest's, for who reads many parts.

    CheckpointError, before reading, if its tensors exceed `most` bytes or the free memory.
    """
    files = manifest_of(path)["files"] if files is None else files
    document = f"{part}.json"
    if document not in files:
        raise CheckpointError(f"{path}: holds no {part}")
    if files[document]["bytes"] > LONGEST_DOCUMENT:
        raise CheckpointError(
            f"{path / document}: holds {files[document]['bytes']:,} bytes of JSON"
        )
    text = check(path / document, files[document], keep=True)
    tensors: dict[str, Tensor] = {}
    entry = files.get(f"{part}.safetensors")
    if entry is not None:
        file, size = path / f"{part}.safetensors", entry["bytes"]
        read = partial(check, file, entry, keep=True)
        tensors = read_tensors(file, read_header(file, size), size, most, read)
    try:
        return from_document(text, tensors)
    except ValueError as error:
        raise CheckpointError(f"{path / document}: {one_line(str(error))}") from None


def read_header(path: Path, size: int) -> bytes:
    """Return the header of a safetensors file of `size` bytes, which must cover the whole file."""
    with open_saved(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LARGEST_HEADER, max(0, size - 8)):
            raise CheckpointError(f"{path}: its header claims {length:,} bytes")
        header = file.read(length)
    _validate_covered(path, header, size - 8 - length)
    return header


def read_tensors(
    path: Path, header: bytes, size: int, most: int | None, read: Callable[[], bytes]
) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file of `size` bytes.

    CheckpointError, before `read` is called, if they exceed `most` bytes or the free memory.
    """
    nbytes = size - 8 - len(header)
    if most is not None and nbytes > most:
        fits = f"where this run has at most {readable(most)}"
        raise CheckpointError(f"{path}: holds {readable(nbytes)} of tensors, {fits}")
    if COPIES * size > WORTH_A_LOOK and COPIES * size > available_bytes():
        free = f"and {readable(available_bytes())} are free"
        raise ShortOfMemoryError(f"{path}: needs {readable(COPIES * size)} of memory, {free}")
    try:
        return load(read())
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: {one_line(str(error))}") from None


def _validate_covered(path: Path, header: bytes, size: int) -> None:
    """Raise CheckpointError if a header does not cover all bytes after it."""
    try:
        table = from_json(header)
        table.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in table.values()]
        covered = max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise CheckpointError(f"{path}: its header is no table of tensors") from None
    if covered != size:
        raise CheckpointError(f"{path}: holds {size:,} bytes, its header describes {covered!r}")
