"""File operations of checkpointing (a class, so that tests can inject failures), safe reading."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Errors of file systems without hard links, or that allow no more of them.
UNLINKABLE = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
# The same without locks (Lustre, unless mounted with them), and that sync no directories (SMB).
LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
UNSYNCABLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Files:
    """Creates files and directories durably (fsync); never overwrites anything."""

    def make_directory(self, path: Path) -> None:
        """Create a directory that does not exist yet."""
        os.mkdir(path, 0o755)

    def write(self, path: Path, data: bytes | memoryview) -> None:
        """Create a file, write it completely and fsync it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(path, flags, 0o644)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(handle, rest) :]
            sync(handle)
        finally:
            os.close(handle)

    def sync(self, path: Path) -> None:
        """Fsync a regular file that is written elsewhere."""
        handle = open_regular(path)
        try:
            sync(handle)
        finally:
            os.close(handle)

    def link(self, existing: Path, path: Path) -> None:
        """Hard-link an immutable file, or copy it where links are not possible."""
        try:
            os.link(existing, path, follow_symlinks=False)
        except OSError as error:
            if error.errno not in UNLINKABLE:
                raise
            self.write(path, read_regular(existing, os.lstat(existing).st_size))

    def sync_directory(self, path: Path) -> None:
        """Fsync a directory, so that its entries are durable, where the file system can."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in UNSYNCABLE:
                raise
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a directory to its final name, which must not exist."""
        if new.exists():
            raise FileExistsError(f"{new} exists already")
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file or a directory tree; of a symbolic link the link, never its target."""
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


@contextmanager
def unchanged_directory() -> Iterator[None]:
    """Return to the working directory on exit: the code of an environment may change it."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # the same
            os.chdir(here)


def sync(handle: int) -> None:
    """Write a file through to the disk: on macOS, fsync alone leaves it in the disk's cache."""
    through = getattr(fcntl, "F_FULLFSYNC", None)
    if through is not None:
        with suppress(OSError):  # not on every file system
            fcntl.fcntl(handle, through)
            return
    os.fsync(handle)


def lock(handle: int, *, wait: bool = False) -> bool:
    """Lock a file; return False if another process has. Where there are no locks, nobody has."""
    try:
        # lockf, not flock: a forked worker that outlives the run must not keep the lock.
        fcntl.lockf(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in LOCKLESS:
            raise
    return True


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file atomically, replacing an existing one."""
    data = content.encode() if isinstance(content, str) else content
    # An unpredictable name: other users of this directory must not choose what is overwritten.
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            sync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def rounded(value: float) -> float:
    """Return a number for a JSON file: six decimals; of small ones, six significant digits."""
    return float(f"{value:.6g}") if abs(value) < 1 else round(value, 6)


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Open a regular file; OSError for pipes, devices (may block) and links unless `follow`."""
    links = 0 if follow else os.O_NOFOLLOW
    try:
        handle = os.open(path, flags | links | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "is a link", str(path)) from None
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a pipe without a reader, a socket
            raise OSError(error.errno, "is not a plain file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a plain file", str(path))
    return handle


def read_regular(path: Path, most: int, *, follow: bool = False) -> bytes:
    """Read a regular file; OSError for anything else, or for more than `most` bytes."""
    with os.fdopen(open_regular(path, follow=follow), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            what = f"{size:,} bytes, at most {most:,} are allowed"
            raise OSError(errno.EFBIG, what, str(path))
        return file.read(size)  # with more, memory for all of `most` would be asked for


def read_tail(path: Path, most: int) -> str:
    """Return the last `most` bytes of a text file."""
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most).decode(errors="replace")


def read_lines(path: Path, longest: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file with the offset of each one's end; overlong lines are cut."""
    with os.fdopen(open_regular(path), "rb") as file:
        while line := file.readline(longest):
            rest = line
            while len(rest) == longest and not rest.endswith(b"\n"):
                rest = file.readline(longest)
            whole = line if rest is line or not rest.endswith(b"\n") else line + b"\n"
            yield whole, file.tell()
