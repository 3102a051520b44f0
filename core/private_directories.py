"""Directories that only this user can write to; compiled code is loaded from no others."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path:
    """Return this user's cache directory (XDG base directories); always absolute.

    Without a home directory it is `steadyrl-<uid>` in the temporary directory.
    """
    for chosen in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        # A missing, empty or relative home would mean the working directory.
        if os.path.isabs(chosen):
            return Path(chosen) / "steadyrl"
    return temporary_folder()


def temporary_folder() -> Path:
    """Return `steadyrl-<uid>` in the temporary directory; another user may own it."""
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written anywhere, which `make_private` reports
        place = os.environ.get("TMPDIR") or "/tmp"
    return Path(place).absolute() / f"steadyrl-{os.geteuid()}"


def code_directory() -> Path:
    """Return the cache directory, or the temporary one if code can be loaded only from that."""
    cache, other = cache_directory(), temporary_folder()
    return other if can_execute(other) and not can_execute(cache) else cache


def can_execute(folder: Path) -> bool:
    """Return whether code in a directory could be loaded: not if it is mounted `noexec`."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return not os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0)


def make_private(folder: Path, *, mode: int = 0o700) -> bool:
    """Create a directory if missing; return whether it is writable, and by this user only.

    So are the directories on the path to it that it creates. Existing ones are not changed.
    """
    try:
        for parent in reversed(folder.parents):
            parent.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=mode)
    except OSError:
        return False
    return is_private(folder) and os.access(folder, os.W_OK | os.X_OK)


def is_private(path: Path) -> bool:
    """Return whether this user owns a file or directory and nobody else can write or replace it.

    Directories on the path to it are checked too.
    """
    try:
        own = os.lstat(path)
        ways = {*path.absolute().parents, *path.resolve(strict=True).parents}
        return (
            own.st_uid == os.geteuid()
            and not stat.S_ISLNK(own.st_mode)
            and not own.st_mode & OTHERS_WRITE
            and all(_keeps_names(os.stat(way)) for way in ways)
        )
    except (OSError, RuntimeError):  # RuntimeError: circular links
        return False


def _keeps_names(way: os.stat_result) -> bool:
    """Return whether only this user and the system can replace entries of a directory."""
    # In a container, system files may belong to another user than root.
    if way.st_uid not in (os.geteuid(), 0, os.stat("/").st_uid):
        return False
    if way.st_mode & stat.S_ISVTX:  # only owners remove and rename
        return True
    open_to_group = way.st_mode & stat.S_IWGRP and not _is_of_one(way.st_gid)
    return not (open_to_group or way.st_mode & stat.S_IWOTH)


def _is_of_one(gid: int) -> bool:
    """Return whether a group is this user's private group."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and not group.gr_mem
