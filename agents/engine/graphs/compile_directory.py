"""Where torch's compiler works: a directory that nobody but this user can write to.

By itself it takes torchinductor_<user> below the temporary directory, whoever made that, and loads
the libraries that it finds there.
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
from steadyrl.core.private_directories import make_private, temporary_folder

log = logging.getLogger("steadyrl")

CHOICE = "TORCHINDUCTOR_CACHE_DIR"
# Where it keeps compiled headers for all processes, whatever directory is chosen.
HEADERS = {"_HEADER_DIR": ("headers",), "_HEADER_LOCK_DIR": ("headers", "locks")}


def compile_directory() -> Path:
    """Return the directory that was chosen, or this user's own, or one of this process only."""
    chosen = os.environ.get(CHOICE)
    if chosen:
        if make_private(Path(chosen).absolute()):
            return Path(chosen).absolute()
        log.warning("%s=%s is not used: others can write to it, or nobody can", CHOICE, chosen)
    own = temporary_folder()
    return own if make_private(own) else Path(_of_this_process().name)


@cache
def _of_this_process() -> TemporaryDirectory[str]:
    """Make a directory that is removed when the process ends."""
    return TemporaryDirectory(prefix="steadyrl-")


@contextmanager
def in_private_directory() -> Iterator[Path]:
    """Let torch's compiler work in such a directory, and in no other."""
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
    from torch._inductor import codecache, config  # slow to import

    before = {name: getattr(codecache, name, None) for name in HEADERS}
    if None in before.values():  # this version of torch keeps them elsewhere, or nowhere
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
