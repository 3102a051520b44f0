"""Paths that torch's compiler can use: it splits its commands at spaces and quotes."""

from __future__ import annotations

import logging
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

from steadyrl.core.private_directories import cache_directory

TORCH = ("_TORCH_PATH", "TORCH_LIB_PATH")  # where its headers and libraries are
TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")  # where TMPDIR itself has a space


def plain_path(path: Path) -> Path:
    """Return a path to the same directory that is one word of a command: a link where needed."""
    if _is_plain(path):
        return path
    link = Path(_links().name, sha256(bytes(path)).hexdigest()[:16])
    with suppress(FileExistsError):
        link.symlink_to(path)
    return link


@contextmanager
def torch_by_plain_paths() -> Iterator[None]:
    """Let torch's compiler find torch itself by such paths."""
    with _silenced("torch.utils.cpp_extension"):  # about CUDA's compiler without a GPU
        from torch.utils import cpp_extension  # slow to import

    before = {name: getattr(cpp_extension, name) for name in TORCH if hasattr(cpp_extension, name)}
    for name, path in before.items():
        setattr(cpp_extension, name, str(plain_path(Path(path))))
    try:
        yield
    finally:
        for name, path in before.items():
            setattr(cpp_extension, name, path)


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    """Keep a logger's warnings from the terminal."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_plain(path: Path) -> bool:
    return shlex.quote(str(path)) == str(path)


@cache
def _links() -> tempfile.TemporaryDirectory[str]:
    """Make a private directory for links, which is removed when the process ends."""
    for place in (Path(tempfile.gettempdir()), *map(Path, TEMPORARY), cache_directory()):
        if _is_plain(place):
            with suppress(OSError):
                return tempfile.TemporaryDirectory(prefix="steadyrl-", dir=place)
    raise OSError("torch's compiler needs a temporary directory without spaces in its path")
