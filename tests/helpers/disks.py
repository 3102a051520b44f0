"""Disks that fail at a given operation, and a simulated power cut."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from steadyrl.core.files import Files

DIRECTORY = -1  # in place of an inode


class FailingFiles(Files):
    """Fails at the n-th operation; a failing write leaves half of its bytes."""

    def __init__(self, at: int, error: int) -> None:
        self.at, self.error, self.count = at, error, 0

    def _fails(self) -> bool:
        self.count += 1
        return self.count == self.at

    def _raise(self) -> None:
        raise OSError(self.error, os.strerror(self.error))

    def write(self, path: Path, data: Any) -> None:
        if self._fails():
            path.write_bytes(bytes(data)[: len(data) // 2])
            self._raise()
        super().write(path, data)


def _counted(name: str) -> Any:
    def operation(self: FailingFiles, *args: Any) -> None:
        if self._fails():
            self._raise()
        getattr(Files, name)(self, *args)

    return operation


for _name in ("make_directory", "link", "sync_directory", "rename", "remove"):
    setattr(FailingFiles, _name, _counted(_name))


class RecordedOs:
    """Replacement of the module `os` that records the order of operations."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self._paths: dict[int, str] = {}
        self.path, self.strerror = os.path, os.strerror

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        handle = os.open(path, flags, mode)
        self._paths[handle] = str(path)
        if flags & os.O_CREAT:
            self.log.append(("create", str(path)))
        return handle

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        os.mkdir(path, mode)
        self.log.append(("mkdir", str(path)))

    def write(self, handle: int, data: Any) -> int:
        written = os.write(handle, data)
        self.log.append(("write", self._paths[handle], bytes(data[:written])))
        return written

    def fsync(self, handle: int) -> None:
        os.fsync(handle)
        self.log.append(("fsync", self._paths[handle]))

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, old: Any, new: Any) -> None:
        os.rename(old, new)
        self.log.append(("rename", str(old), str(new)))

    def replace(self, old: Any, new: Any) -> None:
        os.replace(old, new)
        self.log.append(("rename", str(old), str(new)))

    def link(self, old: Any, new: Any, **options: Any) -> None:
        os.link(old, new, **options)
        self.log.append(("link", str(old), str(new)))


def after_power_cut(log: list[tuple[Any, ...]], *, names_survive: bool) -> dict[str, bytes]:
    """Return the files on a disk after the operations in `log` and a power cut.

    Data without fsync is lost. A name (created, renamed) survives if its directory was fsynced or,
    on file systems that write names early (`names_survive`), in any case.
    """
    contents: dict[int, bytearray] = {}
    forced: dict[int, bytes] = {}
    live: dict[str, int] = {}
    durable: dict[str, int] = {}

    renamed: list[tuple[str, str]] = []
    for kind, path, *rest in log:
        if kind == "mkdir":
            live[path] = DIRECTORY
        elif kind == "create":
            inode = len(contents)
            contents[inode], forced[inode] = bytearray(), b""
            live[path] = inode
        elif kind == "write":
            contents[live[path]] += rest[0]
        elif kind == "link":
            live[rest[0]] = live[path]
        elif kind == "rename":
            live = _moved(live, path, rest[0])
            renamed.append((path, rest[0]))
        elif kind == "fsync" and live.get(path, DIRECTORY) != DIRECTORY:
            forced[live[path]] = bytes(contents[live[path]])
        elif kind == "fsync":  # a directory: its renames, then its new files
            for old, new in [pair for pair in renamed if os.path.dirname(pair[1]) == path]:
                durable = _moved(durable, old, new)
                renamed.remove((old, new))
            durable |= {name: i for name, i in live.items() if os.path.dirname(name) == path}
    names = live if names_survive else durable
    return {name: forced[inode] for name, inode in _reachable(names, live).items()}


def _moved(names: dict[str, int], old: str, new: str) -> dict[str, int]:
    return {
        (new + name[len(old) :] if name == old or name.startswith(old + "/") else name): inode
        for name, inode in names.items()
    }


def _reachable(names: dict[str, int], live: dict[str, int]) -> dict[str, int]:
    """Leave out files in directories that are lost."""
    lost = [name for name, inode in live.items() if inode == DIRECTORY and name not in names]
    return {
        name: inode
        for name, inode in names.items()
        if inode != DIRECTORY and not any(name.startswith(f"{path}/") for path in lost)
    }


def lay_out(disk: dict[str, bytes], source: Path, target: Path) -> None:
    """Write a simulated disk's files below `source` to real files below `target`."""
    for name, data in disk.items():
        path = target / Path(name).relative_to(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
