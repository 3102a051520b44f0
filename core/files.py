"""The few file operations that saving consists of, each of which can be made to fail."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

# What a file system says that has no hard links, or no more of them, or to which none may lead.
UNLINKABLE = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class Files:
    """Files are created new, written whole and forced to the disk; nothing is ever overwritten."""

    def make_directory(self, path: Path) -> None:
        """Create a directory that does not exist yet."""
        os.mkdir(path, 0o755)

    def write(self, path: Path, data: bytes | memoryview) -> None:
        """Create a file, write all of it and wait until the disk has it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(path, flags, 0o644)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)

    def link(self, existing: Path, path: Path) -> None:
        """Give a file that never changes a second name; copy it where that is not possible."""
        try:
            os.link(existing, path, follow_symlinks=False)
        except OSError as error:
            if error.errno not in UNLINKABLE:
                raise
            self.write(path, read_regular(existing, os.lstat(existing).st_size))

    def sync_directory(self, path: Path) -> None:
        """Wait until the disk has the names in a directory."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Give a directory its final name, which must be free."""
        if new.exists():
            raise FileExistsError(f"{new} exists already")
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Remove a directory with all that is in it; a symbolic link itself, never its target."""
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def write_atomic(path: Path, text: str) -> None:
    """Write a file whole or not at all, in the place of whatever has that name."""
    # A private name, made anew: whoever can write here must not choose what is written over.
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Open a plain file: no pipe or device, which might never answer; no link, unless it may be."""
    links = 0 if follow else os.O_NOFOLLOW
    try:
        handle = os.open(path, flags | links | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "is a link", str(path)) from None
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a pipe nobody reads from, a socket
            raise OSError(error.errno, "is not a plain file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a plain file", str(path))
    return handle


def read_regular(path: Path, most: int, *, follow: bool = False) -> bytes:
    """Read a plain file; OSError for another, or one of more than `most` bytes."""
    with os.fdopen(open_regular(path, follow=follow), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            what = f"{size:,} bytes are more than it ever has"
            raise OSError(errno.EFBIG, what, str(path))
        return file.read(most)


def read_tail(path: Path, most: int) -> str:
    """Return the last so many bytes of a plain file of text."""
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most).decode(errors="replace")


def read_lines(path: Path, longest: int) -> Iterator[tuple[bytes, int]]:
    """Yield a plain file's lines and where each ends; of one that is too long the beginning."""
    with os.fdopen(open_regular(path), "rb") as file:
        while line := file.readline(longest):
            rest = line
            while len(rest) == longest and not rest.endswith(b"\n"):
                rest = file.readline(longest)
            whole = line if rest is line or not rest.endswith(b"\n") else line + b"\n"
            yield whole, file.tell()
