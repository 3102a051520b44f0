"""A folder of a store that fsspec knows: list, read within bounds, write whole files, remove.

Layout of a run: `files/<sha256>` holds the files of checkpoints and policies, each once, whatever
refers to it; `checkpoints/step-…/manifest.json` and `policy/manifest.json` name them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from steadyrl.core.command.typed import install_command
from steadyrl.core.errors import SettingError, nearest
from steadyrl.training.checkpoints.manifest import CHUNK, Checkpoint, CheckpointError, saved_at
from steadyrl.training.checkpoints.run_directory import ONE_OF_SEVERAL

FILES, CHECKPOINTS = "files", "checkpoints"
SHA256 = re.compile(r"[0-9a-f]{64}")
# Stores where a file appears once it is complete; elsewhere it is renamed then.
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss")
PART = ".part"


def mirror_url(url: str, run: Path) -> str:
    """Return where a run is copied to: one of several has a folder of its own below the URL."""
    url = url.rstrip("/")
    names = takewhile(ONE_OF_SEVERAL.fullmatch, (each.name for each in (run, *run.parents)))
    own = "/".join([*names][::-1])  # such as job-1/seed-0
    return f"{url}/{own}" if own and not url.endswith(f"/{own}") else url


class RemoteFolder:
    """A folder by its URL, connected when it is first used; methods raise what stores raise."""

    def __init__(self, url: str, field: str) -> None:
        """Import what the URL needs; SettingError of `field` if it is not installed or unknown."""
        self.url, self._protocol = url.rstrip("/"), url.partition("://")[0].lower()
        needs = f"needs the extra cloud: {install_command('cloud')}"
        try:
            from fsspec import available_protocols, get_filesystem_class
        except ImportError:
            raise SettingError(field, url, needs) from None
        try:
            get_filesystem_class(self._protocol)
        except ImportError as error:
            raise SettingError(field, url, f"{needs} ({error})") from None
        except ValueError:
            reason = nearest(self._protocol, sorted(available_protocols()))
            raise SettingError(field, url, f"{self._protocol}:// is unknown; {reason}") from None

    @cached_property
    def _store(self) -> tuple[Any, str]:
        """The file system and the folder's path in it."""
        from fsspec.core import url_to_fs

        options = {"use_listings_cache": False, "skip_instance_cache": True}
        file_system, root = url_to_fs(self.url, **options)
        return file_system, root.rstrip("/")

    @property
    def _renames(self) -> bool:
        return self._protocol not in OBJECT_STORES

    def _at(self, name: str) -> tuple[Any, str]:
        file_system, root = self._store
        return file_system, f"{root}/{name}" if name else root

    def names(self, folder: str) -> list[str]:
        """List what is in a folder; nothing where it does not exist."""
        store, path = self._at(folder)
        store.invalidate_cache()
        try:
            found = store.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files that are stored by their hash."""
        store, path = self._at(FILES)
        store.invalidate_cache()
        try:
            found = store.find(path, detail=True)
        except FileNotFoundError:
            return {}
        named = {name.rpartition("/")[2]: entry["size"] for name, entry in found.items()}
        return {name: size for name, size in named.items() if SHA256.fullmatch(name)}

    def write(self, name: str, source: bytes | Path) -> None:
        """Create or replace a file; readers see the old or the new one."""
        store, path = self._at(name)
        target = path + PART if self._renames else path
        if self._renames:
            store.makedirs(path.rpartition("/")[0], exist_ok=True)
        if isinstance(source, Path):
            store.put_file(str(source), target)
        else:
            store.pipe_file(target, source)
        if self._renames:
            store.mv(target, path)

    def remove(self, name: str) -> None:
        """Remove a file, and its folder if that can be empty."""
        store, path = self._at(name)
        with suppress(FileNotFoundError):
            store.rm_file(path)
        if self._renames and not name.startswith(FILES):
            with suppress(OSError):
                store.rmdir(path.rpartition("/")[0])

    def read(self, name: str, most: int) -> bytes:
        """Read a plain file of at most `most` bytes."""
        store, path = self._plain(name)
        with store.open(path, "rb") as file:
            data: bytes = file.read(most + 1)
        if len(data) > most:
            raise CheckpointError(f"{self.url}/{name}: is larger than {most:,} bytes")
        return data

    def fetch(self, sha256: str, entry: Mapping[str, Any], target: Path) -> None:
        """Write a stored file to the new file `target`; CheckpointError if it is another one."""
        size, digest, name = 0, hashlib.sha256(), f"{FILES}/{sha256}"
        store, path = self._plain(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with store.open(path, "rb") as file, os.fdopen(os.open(target, flags, 0o644), "wb") as out:
            while size <= entry["bytes"] and (chunk := file.read(CHUNK)):
                size += len(chunk)
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if size != entry["bytes"]:
            raise CheckpointError(f"{self.url}/{name}: does not have {entry['bytes']:,} bytes")
        if digest.hexdigest() != sha256:
            raise CheckpointError(f"{self.url}/{name}: is damaged: its hash is another")

    def _plain(self, name: str) -> tuple[Any, str]:
        """Return store and path of a file; of a local store no link, pipe or device."""
        store, path = self._at(name)
        found = store.info(path)
        if found.get("type") != "file" or found.get("islink"):
            raise CheckpointError(f"{self.url}/{name}: is not a plain file")
        return store, path


def checkpoints_at(folder: RemoteFolder) -> list[Checkpoint]:
    """List the checkpoints that a folder names, newest first, complete or not."""
    found = (saved_at(Path(CHECKPOINTS, name)) for name in folder.names(CHECKPOINTS))
    return sorted((saved for saved in found if saved is not None), reverse=True)
