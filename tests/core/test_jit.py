"""Numba kernels: caching, invalidation of the cache, read-only and unsafe directories."""

from __future__ import annotations

import errno
import importlib
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from command import ROOT

from steadyrl.core import jit as jit_module
from steadyrl.core.errors import SettingError

PROBE = """
from probe.double import double
print(double(21), type(double._cache).__name__)
"""
MODULE = """
from probe.jit import jit

@jit
def double(x):
    return 2 * x
"""


def run_probe(folder: Path, *, writable: bool) -> str:
    """Run a kernel in its own package; unwritable: files stand where cache folders would be.

    (Root ignores permissions, but cannot write into a file as into a folder.)
    """
    package = folder / "probe"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "double.py").write_text(MODULE)
    shutil.copy(jit_module.__file__, package / "jit.py")
    home = folder / "home"
    if writable:
        home.mkdir()
    else:
        home.touch()
        (package / "__pycache__").touch()
    outside = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    env = {**outside, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    env["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, cwd="/", capture_output=True, text=True, check=True
    )
    return done.stdout


def test_kernels_are_cached_beside_their_module(tmp_path):
    assert run_probe(tmp_path, writable=True).split() == ["42", "FunctionCache"]
    assert list((tmp_path / "probe" / "__pycache__").glob("double.double-*.nbi"))


def test_kernels_run_uncached_without_a_writable_directory(tmp_path):
    assert run_probe(tmp_path, writable=False).split() == ["42", "NullCache"]


CHAIN = {
    "called": """
from steadyrl.core.jit import jit

FACTOR = {factor}

@jit
def called(x):
    return 2 * x + {more}
""",
    "between": """
from called import FACTOR, called
from steadyrl.core.jit import jit

@jit
def between(x):
    return called(x)
""",
    "caller": """
from between import FACTOR, between
from steadyrl.core.jit import jit

@jit
def caller(x):
    return sum([FACTOR * between(each) for each in (x,)])
""",
}


def imported_afresh(folder, monkeypatch, texts, constants):
    """Return the last module's function as a new process would have it; write what has changed."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    for name, text in texts.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        path, now = folder / f"{name}.py", text.format(**constants) if constants else None
        if now is not None and (not path.exists() or path.read_text() != now):
            path.write_text(now)
    importlib.invalidate_caches()
    return getattr(importlib.import_module(name), name)


def test_kernels_recompile_when_called_functions_or_constants_change(tmp_path, monkeypatch):
    def call(**constants: int) -> tuple[int, int]:
        """Return the result and the cache hits."""
        caller = imported_afresh(tmp_path, monkeypatch, CHAIN, constants)
        return caller(21), sum(caller.stats.cache_hits.values())

    assert call(factor=1, more=0) == (42, 0)
    assert call() == (42, 1)
    assert call(factor=1, more=5) == (47, 0)  # a function two calls away
    assert call(factor=3, more=5) == (141, 0)  # a constant
    assert call() == (141, 1)


MODULES = {
    "tables": "import numpy as np\n\nTABLE = np.array([1.0, {table}])\n",
    "physics": """
from steadyrl.core.jit import jit

GRAVITY = {gravity}

@jit
def pull(x):
    return x * {factor}
""",
    "kernel": """
import physics
from tables import TABLE
from steadyrl.core.jit import jit

@jit
def kernel(x):
    return physics.pull(x) * physics.GRAVITY + TABLE[1]
""",
}


def test_kernels_recompile_when_what_they_read_from_modules_changes(tmp_path, monkeypatch):
    def call(**constants: float) -> tuple[float, int]:
        kernel = imported_afresh(tmp_path, monkeypatch, MODULES, constants)
        return kernel(2.0), sum(kernel.stats.cache_hits.values())

    same = {"table": 0.5, "gravity": 10.0, "factor": 3}
    assert call(**same) == (60.5, 0)
    assert call(**same) == (60.5, 1)
    assert call(**same | {"table": 0.25}) == (60.25, 0)
    assert call(**same | {"gravity": 1.0}) == (6.5, 0)
    assert call(**same | {"factor": 5}) == (100.5, 0)


PLAIN = {
    "planet": "G = {gravity}\n",
    "fall": """
import planet
from numba import njit

@njit
def fall(x):
    return x * planet.G
""",
    "drop": """
from fall import fall
from steadyrl.core.jit import jit

@jit
def drop(x):
    return fall(x)
""",
}


def test_kernels_recompile_when_what_a_function_by_numba_itself_reads_changes(
    tmp_path, monkeypatch
):
    def call(gravity: float) -> tuple[float, int]:
        drop = imported_afresh(tmp_path, monkeypatch, PLAIN, {"gravity": gravity})
        return drop(2.0), sum(drop.stats.cache_hits.values())

    assert [call(10.0), call(10.0), call(1.5)] == [(20.0, 0), (20.0, 1), (3.0, 0)]


GONE = b"\x80\x04\x8c\x04gone\x94\x8c\x06things\x94\x93."  # a pickle of a missing `gone.things`


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:40], lambda data: GONE], ids=["cut", "older"]
)
def test_damaged_cache_files_are_recompiled(tmp_path, monkeypatch, ending, damage):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    (tmp_path / "damaged.py").write_text(CHAIN["called"].format(factor=1, more=0))

    def call() -> tuple[int, int]:
        monkeypatch.delitem(sys.modules, "damaged", raising=False)
        called = importlib.import_module("damaged").called
        return called(21), sum(called.stats.cache_hits.values())

    assert [call(), call()] == [(42, 0), (42, 1)]
    (cache_file,) = (tmp_path / "__pycache__").glob(f"damaged.*.{ending}")
    version = pickle.dumps(numba.__version__, -1) if ending == "nbi" else b""
    cache_file.write_bytes(version + damage(cache_file.read_bytes().removeprefix(version)))
    assert [call(), call()] == [(42, 0), (42, 1)]


CALLING = """
import sys
import numpy as np
from steadyrl.core.jit import Boxed, jit

@jit
def allocated(x):
    made = np.empty(3)
    for i in range(3):
        made[i] = x[i] / 2
    return made

@jit
def hashed(name):
    return hash(name)

@jit
def refused(x):
    if x > 2:
        raise ValueError("too many")
    return [x, x + 1]

@jit
def held(x):
    return Boxed((x, 2.0))

@jit
def read(held):
    return held.value[0][0] * held.value[1]

def compile_more():
    @jit
    def later(x):
        return x + 1
    return later(1.0)

x = np.array([3.0, 1.0, 2.0])
print(allocated(x).tolist(), hashed("a") == hash("a"), refused(1), read(held(x)))
try:
    refused(3)
except ValueError as error:
    print(error)
print("prepared", "numba.misc.cffiimpl" in sys.modules)
print(compile_more())
"""


def test_cached_kernels_run_without_initialising_the_compiler(tmp_path):
    (tmp_path / "calling.py").write_text(CALLING)
    paths = {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": ""}

    def lines() -> list[str]:
        command = [sys.executable, tmp_path / "calling.py"]
        env = {**os.environ, **paths}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    answers = ["[1.5, 0.5, 1.0] True [1, 2] 6.0", "too many"]
    first, later = [[*answers, f"prepared {initialised}", "2.0"] for initialised in (True, False)]
    assert [lines(), lines()] == [first, later]
    (cache_file,) = (tmp_path / "__pycache__").glob("calling.compile_more.*.nbi")
    cache_file.unlink()
    assert lines() == later  # uncached functions compile after cached ones


PLANTED = """
from steadyrl.core.jit import jit

@jit
def planted(x):
    return 2 * x
"""


def import_planted(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, bool]:
    """Import and call as a new process would: (result, cache hits, whether there is a cache)."""
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    importlib.invalidate_caches()
    planted = importlib.import_module("planted").planted
    return planted(21), sum(planted.stats.cache_hits.values()), planted.stats.cache_path is not None


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Return a folder with a kernel's module; the user's cache folder lies beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "planted.py").write_text(PLANTED)
    return tmp_path / "code"


def test_cache_folders_writable_by_others_are_not_used(planted, monkeypatch, tmp_path):
    assert import_planted(monkeypatch) == (42, 0, True)
    assert import_planted(monkeypatch) == (42, 1, True)
    (planted / "__pycache__").chmod(0o777)
    assert import_planted(monkeypatch) == (42, 0, True)  # cached in the user's folder from now on
    assert list((tmp_path / "caches" / "steadyrl" / "numba").rglob("planted*.nbi"))
    assert import_planted(monkeypatch) == (42, 1, True)
    (tmp_path / "caches" / "steadyrl").chmod(0o777)
    assert import_planted(monkeypatch) == (42, 0, False)


def test_code_is_used_where_the_disk_is_too_full_to_keep_it(planted, monkeypatch):
    def full(self, *arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", full)
    assert import_planted(monkeypatch) == (42, 0, True)
    monkeypatch.undo()


def test_code_for_other_types_is_compiled_again(planted, monkeypatch):
    """Two processes that save at once can leave an index that names the other's code."""

    def results() -> tuple[list[int | float], int]:
        monkeypatch.delitem(sys.modules, "planted", raising=False)
        planted = importlib.import_module("planted").planted
        found = [planted(21), planted(0.5)]
        return found, sum(planted.stats.cache_hits.values())

    assert [results(), results()] == [([42, 1.0], 0), ([42, 1.0], 2)]
    one, other = sorted((planted / "__pycache__").glob("planted*.nbc"))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    assert [results(), results()] == [([42, 1.0], 0), ([42, 1.0], 2)]


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_cache_files_writable_by_others_are_recompiled(planted, monkeypatch, ending):
    before = os.umask(0)  # new files would be writable by everybody; cache files must not be
    try:
        assert [import_planted(monkeypatch) for _ in range(2)] == [(42, 0, True), (42, 1, True)]
    finally:
        os.umask(before)
    (cache_file,) = (planted / "__pycache__").glob(f"planted*.{ending}")
    assert not cache_file.stat().st_mode & 0o022
    cache_file.chmod(0o666)
    assert [import_planted(monkeypatch) for _ in range(2)] == [(42, 0, True), (42, 1, True)]


@pytest.mark.parametrize("part", ["_load_index", "_load_data", "_save_index", "_data_path"])
def test_unknown_numba_internals_disable_the_cache(planted, monkeypatch, part):
    """Only our stamps cover called functions: without them stale code would be loaded."""
    from numba.core.caching import IndexDataCacheFile

    monkeypatch.delattr(IndexDataCacheFile, part)
    assert import_planted(monkeypatch) == (42, 0, False)


def test_without_a_home_nothing_is_cached_in_the_working_directory(planted, monkeypatch, tmp_path):
    (planted / "__pycache__").touch()
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert import_planted(monkeypatch)[:2] == (42, 0)
    assert list((tmp_path / "here").iterdir()) == []


def test_numba_disable_jit_is_rejected_in_one_line(monkeypatch):
    monkeypatch.setattr(jit_module.settings, "DISABLE_JIT", 1)
    with pytest.raises(SettingError, match=r"^NUMBA_DISABLE_JIT=1: .* unset it$"):
        jit_module.jit(int)
