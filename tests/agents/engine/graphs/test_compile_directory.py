"""torch's compiler uses directories that no other user can write to."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
import torch._inductor
from torch._inductor import codecache
from torch._inductor.runtime.cache_dir_utils import cache_dir

from steadyrl.agents.engine.graphs import compile_directory
from steadyrl.agents.engine.graphs.compile_directory import CHOICE, in_private_directory


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    """Use a world-writable temporary directory of the test."""
    monkeypatch.delenv(CHOICE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    compile_directory._of_this_process.cache_clear()
    yield tmp_path
    compile_directory._of_this_process.cache_clear()


def worked_in():
    """Return the compiler's directory, its header directories if any, and its configuration."""
    with in_private_directory():
        headers = (getattr(codecache, name, None) for name in compile_directory.HEADERS)
        found = [cache_dir(), *filter(None, headers)]  # older torch has none
        found = [Path(each).resolve() for each in found]  # symlinks replace names with spaces
    assert CHOICE not in os.environ
    return found


def test_the_compiler_and_its_headers_use_a_private_directory(temporary):
    folder, *headers = worked_in()
    assert folder.parent == temporary and not folder.name.startswith("torchinductor")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(each.is_relative_to(folder) for each in headers)
    assert worked_in()[0] == folder  # shared headers are compiled once


def test_a_directory_writable_by_others_is_not_used(temporary):
    planted, *_ = worked_in()
    planted.chmod(0o777)
    folder, *headers = worked_in()
    assert folder != planted and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(each.is_relative_to(folder) for each in headers)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory away needs root")
def test_a_directory_created_by_another_user_is_not_used():
    planted, *_ = worked_in()
    os.chown(planted, 65534, 65534)
    assert worked_in()[0] != planted


def test_a_link_is_not_followed(temporary):
    planted, *_ = worked_in()
    planted.rename(temporary / "theirs")
    planted.symlink_to("theirs")
    assert worked_in()[0] not in (planted, temporary / "theirs")


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_configured_directory_is_used_if_private(temporary, monkeypatch, caplog, mode):
    chosen = temporary / "chosen"
    chosen.mkdir()
    chosen.chmod(mode)
    monkeypatch.setenv(CHOICE, str(chosen))
    with in_private_directory() as folder:
        assert Path(cache_dir()) == folder
        assert (folder.resolve() == chosen) == (mode == 0o700)
    assert os.environ[CHOICE] == str(chosen)
    assert ("ignoring" in caplog.text) == (mode == 0o777)


@pytest.mark.skipif(not hasattr(codecache, "_HEADER_DIR"), reason="this torch keeps no headers")
def test_precompiled_headers_are_disabled_for_unknown_torch_versions(monkeypatch):
    monkeypatch.delattr(codecache, "_HEADER_DIR")
    with in_private_directory():
        assert not torch._inductor.config.aot_inductor.precompile_headers
    assert torch._inductor.config.aot_inductor.precompile_headers
