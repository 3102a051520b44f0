"""Write TensorBoard event files directly: one record per log interval, no thread, no queue."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class EventFile:
    """One event file; scalars of one step are one record."""

    def __init__(self, directory: Path) -> None:
        # Two files opened within a second (after a disk error) must not share a name.
        stamp = f"{time.time():.6f}".replace(".", "")
        name = f"events.out.tfevents.{stamp}.{socket.gethostname()}.{os.getpid()}"
        self._stream = (directory / name).open("xb")
        self._records = RecordWriter(self._stream)
        self._write(Event(file_version="brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the scalars of a step and hand them to the system."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._stream.flush()

    def close(self) -> None:
        """Close the file; what a full disk refused before, it may refuse again."""
        self._stream.close()
