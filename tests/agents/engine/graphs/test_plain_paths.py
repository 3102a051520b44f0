"""torch's compiler finds what it needs, whatever directories are called."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from steadyrl.agents.engine.graphs import plain_paths
from steadyrl.agents.engine.graphs.plain_paths import plain_path, torch_by_plain_paths
from steadyrl.agents.engine.inductor import CompiledGraph


@pytest.fixture(autouse=True)
def links_of_this_test():
    plain_paths._links.cache_clear()
    yield
    plain_paths._links.cache_clear()


@pytest.mark.parametrize("name", ["some folder", "o'brien", 'a "quote"', "back\\slash", "a;b", "é"])
def test_a_path_that_is_several_words_of_a_command_is_reached_by_a_link(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    found = plain_path(folder)
    assert plain_paths._is_plain(found) and found.samefile(folder)
    assert plain_path(folder) == found  # headers made once are found again


def test_another_path_stays_as_it_is():
    assert plain_path(Path("/usr/lib")) == Path("/usr/lib")


def test_the_link_lies_elsewhere_where_the_temporary_directory_has_a_space(tmp_path, monkeypatch):
    place, elsewhere = tmp_path / "some folder", tmp_path / "elsewhere"
    for each in (place, elsewhere):
        each.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(plain_paths, "TEMPORARY", (str(tmp_path / "missing"), str(elsewhere)))
    found = plain_path(place)
    assert found.is_relative_to(elsewhere) and found.samefile(place)


def test_torch_is_named_by_links_and_then_as_before(tmp_path, monkeypatch):
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


def test_where_no_link_can_be_made_one_short_line_says_so(tmp_path, monkeypatch, caplog):
    place = tmp_path / "some folder"
    place.mkdir()
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(plain_paths, "TEMPORARY", ())
    update = CompiledGraph(lambda x: (x + 1,), lambda x: (x + 1,))
    (found,) = update(torch.ones(2))
    assert found.tolist() == [2, 2]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "running eagerly: " in line and "without spaces" in line and len(line) < 160
