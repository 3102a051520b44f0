"""The cache of compiled graphs: an equal graph is loaded, not compiled again."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch._inductor
from torch.utils import cpp_extension

from steadyrl.agents.engine.graphs import graph_cache as kept_graphs
from steadyrl.agents.engine.graphs.compile_directory import CHOICE, compile_directory
from steadyrl.agents.engine.graphs.graph_cache import fingerprint, host_code
from steadyrl.agents.engine.graphs.trace import trace
from steadyrl.core.gates.gate import Unsupported
from steadyrl.core.private_directories import code_directory

KEY = "[0-9a-f]{32}"
HEADERS = ("cpp_cache_precompile_headers", "aot_inductor.precompile_headers")


def steps(x, total):
    total.add_(1)
    return (x * 3 + total).tanh(), total.clone()


def inputs(size=3):
    return [torch.linspace(-1, 1, size), torch.zeros(())]


def graph(function=steps, size=3):
    compiled, captured = trace(function, tuple(inputs(size)))
    assert not captured
    return compiled


@pytest.fixture(scope="module")
def library_path(tmp_path_factory):
    """Return a compiled and cached library, with a space in every path involved."""
    torch_lib = tmp_path_factory.mktemp("some folder") / "lib"
    torch_lib.symlink_to(cpp_extension.TORCH_LIB_PATH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp_extension, "TORCH_LIB_PATH", str(torch_lib))
        patch.setenv(CHOICE, str(tmp_path_factory.mktemp("some compile directory")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("some cache")))
        known = torch._inductor.config.get_config_copy()
        # For a single graph, precompiling headers takes longer than it saves.
        with torch._inductor.config.patch({key: False for key in HEADERS if key in known}):
            host_code(graph(), inputs())
        (library,) = code_directory().iterdir()
        assert str(torch_lib) == cpp_extension.TORCH_LIB_PATH, "it is put back"
        yield library


@pytest.fixture
def compilations(library_path, monkeypatch, tmp_path):
    """Use a cache directory of the test and a fake compiler; return the list of compilations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code_directory().mkdir()
    compiled = shutil.copy(library_path, tmp_path / "made.so")
    calls = []

    def aot_compile(module, args):
        calls.append(args)
        return str(compiled)

    monkeypatch.setattr(torch._inductor, "aot_compile", aot_compile)
    return calls


def agrees(run):
    x, total = inputs()
    for _ in range(3):
        expected = steps(x, total.clone())
        for ours, theirs in zip(run([x, total]), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert total.item() == 3


@pytest.mark.long
def test_a_cached_graph_is_loaded_and_computes_the_same(library_path, compilations):
    shutil.copy(library_path, code_directory())
    agrees(host_code(graph(), inputs()))
    assert not compilations


def test_a_damaged_cache_entry_is_compiled_again(library_path, compilations):
    broken = code_directory() / library_path.name
    broken.write_bytes(b"not a library")
    agrees(host_code(graph(), inputs()))
    assert len(compilations) == 1
    assert broken.read_bytes() == library_path.read_bytes()


def test_without_a_writable_cache_graphs_are_compiled_anyway(compilations, monkeypatch, tmp_path):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    agrees(host_code(graph(), inputs()))
    assert len(compilations) == 1


def test_the_cache_keeps_recently_used_libraries_only(
    library_path, compilations, monkeypatch, tmp_path
):
    monkeypatch.setattr(kept_graphs, "MAX_CACHED", 3)
    for age in range(5):
        old = code_directory() / f"{age}.so"
        old.touch()
        os.utime(old, (age, age))
    host_code(graph(), inputs())
    assert {path.name for path in code_directory().iterdir()} == {library_path.name, "4.so", "3.so"}


@pytest.mark.parametrize("of", ["library", "folder", "parent"])
def test_libraries_writable_by_others_are_not_loaded(
    library_path, compilations, of, monkeypatch, tmp_path
):
    library = Path(shutil.copy(library_path, code_directory()))
    planted = {"library": library, "folder": code_directory(), "parent": tmp_path}[of]
    monkeypatch.setattr(kept_graphs, "_mark_used", lambda _: pytest.fail("it was loaded"))
    planted.chmod(0o777)
    agrees(host_code(graph(), inputs()))
    assert len(compilations) == 1
    if of == "library":  # recompiled as our file
        assert library.stat().st_mode & 0o777 == 0o600
    planted.chmod(0o700)


def test_symlinked_libraries_are_not_loaded(library_path, compilations, tmp_path):
    (code_directory() / library_path.name).symlink_to(library_path)
    agrees(host_code(graph(), inputs()))
    assert len(compilations) == 1 and not (code_directory() / library_path.name).is_symlink()


def test_cache_keys_depend_on_function_shapes_and_threads(monkeypatch):
    def likewise(x, total):
        total.add_(1)
        return (x * 3.0000000000000004 + total).tanh(), total.clone()

    names = {
        fingerprint(graph(), inputs()),
        fingerprint(graph(likewise), inputs()),
        fingerprint(graph(size=4), inputs(4)),
    }
    monkeypatch.setattr(torch, "get_num_threads", lambda: 63)
    names.add(fingerprint(graph(), inputs()))
    assert len(names) == 4
    assert fingerprint(graph(), inputs()) in names


def test_the_cache_directory_is_private(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert code_directory() == Path(tmp_path, ".cache", "steadyrl")


@pytest.fixture
def noexec(tmp_path_factory):
    """Return a function that mounts a file system without code, unmounted afterwards."""
    mounted = []

    def mount():
        place = tmp_path_factory.mktemp("noexec")
        how = ["-t", "tmpfs", "-o", "noexec,size=20m,mode=700", "tmpfs", str(place)]
        if subprocess.run(["mount", *how], capture_output=True).returncode:
            pytest.skip("mounting file systems needs rights that this user lacks")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system")
def test_a_cache_without_execution_moves_to_the_temporary_directory(
    compilations, noexec, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(noexec()))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for _ in range(2):  # compiled by the first of two runs
        agrees(host_code(graph(), inputs()))
    assert len(compilations) == 1
    assert (
        code_directory().parent == tmp_path / "tmp"
        and len(list(code_directory().glob("*.so"))) == 1
    )


@pytest.mark.skipif(sys.platform != "linux", reason="mounts file systems")
def test_where_no_directory_executes_nothing_is_compiled(compilations, noexec, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(noexec()))
    monkeypatch.setattr(tempfile, "tempdir", str(noexec()))
    with pytest.raises(Unsupported, match=r"mounted noexec.*updates run eagerly\. Set XDG_CACHE"):
        host_code(graph(), inputs())
    assert not compilations


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system")
def test_the_compiler_works_where_code_can_be_loaded(noexec, monkeypatch, tmp_path):
    monkeypatch.delenv(CHOICE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(noexec()))
    assert compile_directory() == tmp_path / "steadyrl" / "compiler"


@pytest.mark.skipif(sys.platform != "linux", reason="tried by a fork")
@pytest.mark.parametrize("cached", [False, True])
def test_a_library_that_crashes_when_loaded_is_refused(compilations, tmp_path, capfd, cached):
    crash = "#include <signal.h>\n__attribute__((constructor)) void f() { raise(SIGSEGV); }\n"
    (tmp_path / "crash.c").write_text(crash)
    library = (
        code_directory() / f"{fingerprint(graph(), inputs())}.so"
        if cached
        else tmp_path / "made.so"
    )
    subprocess.run(["cc", "-shared", "-o", library, tmp_path / "crash.c"], check=True)
    library.chmod(0o600)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(Unsupported, match=rf"loading .*/{KEY}.so crashes \(SIGSEGV\), updates run"):
        host_code(graph(), inputs())
    assert len(compilations) == (not cached)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert capfd.readouterr() == ("", "")
    # The next run knows without compiling.
    with pytest.raises(Unsupported):
        host_code(graph(), inputs())
    assert len(compilations) == (not cached)
