"""The working directory of torch's compiler, writable by this user only.

The default, torchinductor_<user> in the temporary directory, may have been created by another user,
and libraries found in it are loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from steadyrl.agents.engine.graphs.plain_paths import plain_path, torch_by_plain_paths
from steadyrl.core.gates.torch_private import COMPILER, TORCH
from steadyrl.core.private_directories import (
    cache_directory,
    can_execute,
    make_private,
    temporary_folder,
)

log = logging.getLogger("steadyrl")

CHOICE = "TORCHINDUCTOR_CACHE_DIR"
# Where it keeps precompiled headers for all processes, whatever the cache directory.
HEADERS = {"_HEADER_DIR": ("headers",), "_HEADER_LOCK_DIR": ("headers", "locks")}


def compile_directory() -> Path:
    """Return the configured directory, else this user's own, else a temporary one."""
    chosen = os.environ.get(CHOICE)
    if chosen:
        if make_private(Path(chosen).absolute()):
            return Path(chosen).absolute()
        log.warning(
            "ignoring %s=%s, not writable, or by other users too: using a private directory",
            CHOICE,
            chosen,
        )
    for own in (temporary_folder(), cache_directory() / "compiler"):
        if make_private(own) and can_execute(own):  # the compiler tries code that it makes
            return own
    return Path(_of_this_process().name)


@cache
def _of_this_process() -> TemporaryDirectory[str]:
    """Create a directory that is removed when the process exits."""
    return TemporaryDirectory(prefix="steadyrl-")


@contextmanager
def in_private_directory() -> Iterator[Path]:
    """Make torch's compiler work in the private directory."""
    chosen, folder = os.environ.get(CHOICE), plain_path(compile_directory())
    os.environ[CHOICE] = str(folder)
    try:
        with _headers_in(folder), torch_by_plain_paths():
            yield folder
    finally:
        os.environ.pop(CHOICE)
        if chosen is not None:
            os.environ[CHOICE] = chosen


@contextmanager
def _headers_in(folder: Path) -> Iterator[None]:
    codecache, config = (TORCH[f"{COMPILER}.{name}"] for name in ("codecache", "config"))
    before = {name: getattr(codecache, name, None) for name in HEADERS}
    if None in before.values():  # this version of torch has no such directories
        keys = ("cpp_cache_precompile_headers", "aot_inductor.precompile_headers")
        with config.patch({key: False for key in keys if key in config.get_config_copy()}):
            yield
        return
    for name, below in HEADERS.items():
        setattr(codecache, name, str(folder.joinpath(*below)))
    try:
        yield
    finally:
        for name, place in before.items():
            setattr(codecache, name, place)
