"""Compiled code is loaded only from files and folders that no other user can write."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from steadyrl.core.private_directories import (
    cache_directory,
    is_private,
    make_private,
    temporary_folder,
)

NOBODY = 65534


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o722])
def test_paths_writable_by_others_are_not_private(tmp_path, mode):
    folder, file = tmp_path / "folder", tmp_path / "file"
    assert make_private(folder) and folder.stat().st_mode & 0o777 == 0o700
    file.write_bytes(b"code")
    assert is_private(file)
    for path in (folder, file):
        path.chmod(mode)
        assert not is_private(path)
    assert (
        not make_private(folder) and folder.stat().st_mode & 0o777 == mode
    )  # permissions unchanged


def test_paths_below_a_folder_writable_by_others_are_not_private(tmp_path):
    file = tmp_path / "open" / "folder" / "file"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"code")
    assert is_private(file)
    file.parent.parent.chmod(0o777)
    assert not is_private(file) and not is_private(file.parent)
    file.parent.parent.chmod(0o1777)  # sticky as /tmp: only owners remove and rename
    assert is_private(file)


def test_where_nothing_can_be_written_the_temporary_folder_is_unusable(tmp_path, monkeypatch):
    """As on a full disk."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file" / "folder"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", _none_is_usable)
    assert temporary_folder().parent == tmp_path / "file" / "folder"
    assert not make_private(temporary_folder())


def _none_is_usable():
    raise FileNotFoundError(2, "No usable temporary directory found")


def test_symlinks_and_missing_paths_are_not_private(tmp_path):
    (tmp_path / "file").write_bytes(b"code")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("link", "circle", "nothing"):
        assert not is_private(tmp_path / name)
    assert not make_private(tmp_path / "file" / "below")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_the_whole_path_that_is_created_is_private(tmp_path, umask):
    before = os.umask(umask)
    try:
        assert make_private(tmp_path / "cache" / "steadyrl" / "code")
    finally:
        os.umask(before)
    for folder in ("cache", "cache/steadyrl", "cache/steadyrl/code"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_paths_of_another_user_are_not_private(tmp_path):
    file = tmp_path / "theirs" / "ours"
    file.parent.mkdir(mode=0o755)
    file.write_bytes(b"code")
    os.chown(file, NOBODY, NOBODY)
    assert not is_private(file)
    os.chown(file, 0, 0)
    assert is_private(file)
    os.chown(file.parent, NOBODY, NOBODY)
    assert not is_private(file.parent) and not is_private(file)


@pytest.mark.parametrize("home", [None, "", "relative"])
@pytest.mark.parametrize("chosen", [None, "", "caches"])
def test_without_a_home_the_cache_is_outside_the_working_directory(
    tmp_path, monkeypatch, home, chosen
):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name, value in (("HOME", home), ("XDG_CACHE_HOME", chosen)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cache_directory().is_absolute() and tmp_path not in cache_directory().parents
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory() == Path("/caches/steadyrl")
