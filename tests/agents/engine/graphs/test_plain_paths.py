"""torch's compiler works although directories have spaces or quotes in their names."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from steadyrl.agents.engine.graphs import plain_paths
from steadyrl.agents.engine.graphs.plain_paths import plain_path, torch_by_plain_paths
from steadyrl.agents.engine.inductor import CompiledGraph


@pytest.fixture(autouse=True)
def fresh_link_cache():
    plain_paths._links.cache_clear()
    yield
    plain_paths._links.cache_clear()


@pytest.mark.parametrize("name", ["some folder", "o'brien", 'a "quote"', "back\\slash", "a;b", "é"])
def test_paths_with_special_characters_are_reached_by_a_symlink(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    found = plain_path(folder)
    assert plain_paths._is_plain(found) and found.samefile(folder)
    assert plain_path(folder) == found  # so precompiled headers are reused


def test_plain_paths_are_returned_unchanged():
    assert plain_path(Path("/usr/lib")) == Path("/usr/lib")


def test_symlinks_avoid_a_temporary_directory_with_a_space(tmp_path, monkeypatch):
    folder, fallback = tmp_path / "some folder", tmp_path / "elsewhere"
    for each in (folder, fallback):
        each.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(plain_paths, "TEMPORARY", (str(tmp_path / "missing"), str(fallback)))
    found = plain_path(folder)
    assert found.is_relative_to(fallback) and found.samefile(folder)


def test_torch_paths_are_symlinks_inside_the_context_only(tmp_path, monkeypatch):
    before = {}
    for name in plain_paths.TORCH:
        folder = tmp_path / f"some {name}"
        folder.symlink_to(getattr(cpp_extension, name))
        before[name] = str(folder)
        monkeypatch.setattr(cpp_extension, name, str(folder))
    with torch_by_plain_paths():
        for name, path in before.items():
            found = Path(getattr(cpp_extension, name))
            assert plain_paths._is_plain(found) and found.samefile(path)
    assert before == {name: getattr(cpp_extension, name) for name in plain_paths.TORCH}


def test_a_failing_symlink_falls_back_to_eager_with_one_warning(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "some folder"
    folder.mkdir()
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(plain_paths, "TEMPORARY", ())
    update = CompiledGraph(lambda x: (x + 1,), lambda x: (x + 1,))
    (found,) = update(torch.ones(2))
    assert found.tolist() == [2, 2]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "running eagerly: " in line and "without spaces" in line and len(line) < 160
