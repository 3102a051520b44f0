"""Directories that only this user can write to: compiled code is loaded from no others."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path:
    """Return where this user's caches are, by the XDG base directories; always absolute.

    Who has no home has a directory of this user's number below the temporary one.
    """
    for chosen in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        # A home may be missing, empty or relative: nothing is looked for where we happen to be.
        if os.path.isabs(chosen):
            return Path(chosen) / "steadyrl"
    return temporary_folder()


def temporary_folder() -> Path:
    """Return this user's own directory below the temporary one, whoever may have made it."""
    return Path(tempfile.gettempdir()).absolute() / f"steadyrl-{os.geteuid()}"


def make_private(folder: Path, *, mode: int = 0o700) -> bool:
    """Create a directory where there is none; tell whether only this user can write to it.

    What was there before is left as it is.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True, mode=mode)
    except OSError:
        return False
    return is_private(folder) and os.access(folder, os.W_OK | os.X_OK)


def is_private(path: Path) -> bool:
    """Tell whether this user owns a file or a directory, and nobody else can write to it.

    Nor to a directory on the way to it, where somebody could put another in its place.
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
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        return False


def _keeps_names(way: os.stat_result) -> bool:
    """Tell whether nobody but this user and the system can replace what a directory holds."""
    # In a container the system's files may belong to another than root.
    if way.st_uid not in (os.geteuid(), 0, os.stat("/").st_uid):
        return False
    if way.st_mode & stat.S_ISVTX:  # only owners remove and rename
        return True
    open_to_group = way.st_mode & stat.S_IWGRP and not _is_of_one(way.st_gid)
    return not (open_to_group or way.st_mode & stat.S_IWOTH)


def _is_of_one(gid: int) -> bool:
    """Tell whether a group is this user's own, as many systems make one for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and not group.gr_mem
