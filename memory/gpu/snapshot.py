"""A snapshot of a card's allocations when its memory ends; pytorch.org/memory_viz opens it."""

from __future__ import annotations

import logging
from pathlib import Path
from weakref import WeakMethod

from steadyrl.core.errors import describe
from steadyrl.core.gates.torch_private import TORCH, dump_snapshot, record_allocations

log = logging.getLogger("steadyrl")

MOST_ENTRIES = 100_000  # newest allocations and releases with their Python frames, some 50 MB


class SnapshotAtEnd:
    """Records allocations, and writes them to a file the first time that memory ends."""

    def __init__(self, path: Path) -> None:
        """Start, once the card is in use."""
        self._path, self._written = path, False
        self._records = TORCH.offers("snapshot")
        if self._records:
            # torch never drops a callback, which must not keep this object alive.
            write = WeakMethod(self._write)
            record_allocations(MOST_ENTRIES, lambda *_: (write() or (lambda: None))())

    def close(self) -> None:
        """Stop recording; may be called twice."""
        records, self._records = self._records, False
        if records:
            record_allocations(0)

    def _write(self) -> None:
        if self._written or not self._records:
            return
        self._written = True
        try:
            dump_snapshot(str(self._path))
        except (OSError, RuntimeError) as error:
            log.warning("cannot write %s (%s)", self._path, describe(error))
        else:
            log.warning(
                "memory of the card ended: what was allocated is in %s "
                "(https://pytorch.org/memory_viz opens it)",
                self._path,
            )
