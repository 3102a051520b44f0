"""Kernels compile anywhere, also where nothing may be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from memory import compiled as compiled_module

PROBE = """
from probe.double import double
print(double(21), type(double._cache).__name__)
"""
MODULE = """
from probe.compiled import compiled

@compiled
def double(x):
    return 2 * x
"""


def run_probe(folder: Path, *, writable: bool) -> str:
    """Run a kernel in a package of its own; unwritable means files where caches would be.

    (Permissions would not stop an administrator, a file in a folder's place does.)
    """
    package = folder / "probe"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "double.py").write_text(MODULE)
    shutil.copy(compiled_module.__file__, package / "compiled.py")
    home = folder / "home"
    if writable:
        home.mkdir()
    else:
        home.touch()
        (package / "__pycache__").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    env = {**kept, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    env["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, cwd="/", capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_kernel_is_cached_where_it_may_write(tmp_path):
    assert run_probe(tmp_path, writable=True).split() == ["42", "FunctionCache"]
    assert list((tmp_path / "probe" / "__pycache__").glob("double.double-*.nbi"))


def test_a_kernel_runs_uncached_where_nothing_may_be_written(tmp_path):
    assert run_probe(tmp_path, writable=False).split() == ["42", "NullCache"]
