"""Write TensorBoard event files directly: no thread, no queue, errors are raised.

A file is a sequence of records: length, payload, and a checksum of each. TensorBoard's own writer
imports every file system it supports, which adds 0.2 s to the start-up.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from os import getpid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MultilineChartContent,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from typing_extensions import override

from steadyrl.core.jit import jit
from steadyrl.training.logging.charts import CHARTS, REPORTED
from steadyrl.training.logging.sinks import Record, RunInfo, Sink

HPARAMS, LAYOUT = (
    "_hparams_/session_start_info",
    "custom_scalars__config__",
)
BUCKETS = 20
BETWEEN_HISTOGRAMS = 1.0  # seconds: one costs as much as all else in a record
RGB = 3  # TensorBoard's number of this colour space
EVENTS = "events.out.tfevents"  # prefix of event file names


class EventFile:
    """One event file: one record per event."""

    def __init__(self, directory: Path) -> None:
        name = f"{EVENTS}.{_next_stamp(directory)}.{socket.gethostname()}.{getpid()}"
        self._stream = (directory / name).open("xb")
        try:
            self.write(Event(file_version="brain.Event:2"))
        except OSError:
            with suppress(OSError):
                self.close()
            raise

    def write(self, *events: Event) -> None:
        """Append events in a single write and flush it."""
        now = time.time()
        for event in events:
            event.wall_time = now
        self._stream.write(b"".join([framed(event.SerializeToString()) for event in events]))
        self._stream.flush()

    def close(self) -> None:
        """Close the file; raise OSError if the last write cannot be flushed."""
        self._stream.close()


def _next_stamp(directory: Path) -> str:
    """Return the time in microseconds, or one more than the newest file's.

    TensorBoard reads files in the order of their names. Without this, two files opened at once
    (after a disk error) or a clock set back would break that order.
    """
    now = f"{time.time():.6f}".replace(".", "")
    stamps = (path.name.split(".")[3] for path in directory.glob(f"{EVENTS}.*"))
    later = (int(each) + 1 for each in stamps if each.isdecimal() and len(each) == len(now))
    return str(max([int(now), *later]))


class TensorBoard(Sink):
    """Scalars, histograms, the configuration and the HParams of a run."""

    def __init__(self, directory: Path, info: RunInfo | None = None) -> None:
        self._directory, self._info = directory, info
        self._file: EventFile | None = None
        self._has_start_event = False
        self._next_histogram = 0.0  # in seconds since the run started

    @override
    def write(self, record: Record) -> None:
        events = [_event(at, _scalars({"rollout/return": value})) for at, value in record.episodes]
        values = _scalars(record.scalars)
        if record.returns and record.wall_seconds >= self._next_histogram:
            values.append(_histogram("rollout/returns", record.returns))
            self._next_histogram = record.wall_seconds + BETWEEN_HISTOGRAMS
        try:
            file = self._file or self._open_file(0)
            file.write(*events, _event(record.step, values))
        except OSError:
            self.close()
            raise

    @override
    def write_video(self, step: int, gif: bytes) -> None:
        width, height = (int.from_bytes(gif[at : at + 2], "little") for at in (6, 8))
        image = Summary.Image(height=height, width=width, colorspace=RGB, encoded_image_string=gif)
        try:
            value = Summary.Value(tag="eval/film", image=image)
            (self._file or self._open_file(0)).write(_event(step, [value]))
        except OSError:
            self.close()
            raise

    @override
    def continue_after(self, step: int) -> None:
        try:
            self._open_file(step, resumed=True)
        except OSError:
            self.close()
            raise

    def _open_file(self, step: int, *, resumed: bool = False) -> EventFile:
        """Open a new event file; the first one also gets the configuration and page layout."""
        self._file = file = EventFile(self._directory)
        if resumed or not self._has_start_event:
            # SessionLog.START makes TensorBoard drop the events of later steps in earlier files. It
            # ignores the first START it reads, so the first file has one too.
            start = SessionLog(status=SessionLog.START)
            file.write(Event(step=step + 1 if resumed else 0, session_log=start))
            self._has_start_event = True
        if self._info is not None:
            pages = [_command(self._info), _configuration(self._info)]
            # A resumed run keeps the layout and HParams of its first file.
            pages += [] if resumed else [_hparams(self._info), _layout(self._info)]
            file.write(_event(step, pages))
            self._info = None
        return file

    @override
    def close(self) -> None:
        # A truncated record would hide everything after it, so a new file is opened next.
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def _event(step: int, values: Sequence[Summary.Value]) -> Event:
    return Event(step=step, summary=Summary(value=values))


def _scalars(values: Mapping[str, float]) -> list[Summary.Value]:
    return [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]


def _histogram(tag: str, values: Sequence[float]) -> Summary.Value:
    counts, edges = np.histogram(values, BUCKETS)
    histogram = HistogramProto(
        min=min(values),
        max=max(values),
        num=len(values),
        sum=float(np.sum(values)),
        sum_squares=float(np.square(values).sum()),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
    return Summary.Value(tag=tag, histo=histogram)


def _page(tag: str, plugin: str, text: bytes | None, content: bytes = b"") -> Summary.Value:
    """Return a value for a TensorBoard plugin: a text, or only the plugin's metadata."""
    data = SummaryMetadata.PluginData(plugin_name=plugin, content=content)
    tensor = TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto(dim=[{"size": 0}]))
    if text is not None:
        tensor = TensorProto(dtype=DT_STRING, string_val=[text])
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=data), tensor=tensor)


def _command(info: RunInfo) -> Summary.Value:
    return _page("command", "text", f"    {info.command}".encode())


def _configuration(info: RunInfo) -> Summary.Value:
    text = OmegaConf.to_yaml(OmegaConf.create(dict(info.config)))
    return _page("configuration", "text", f"```yaml\n{text}```".encode())


def _hparams(info: RunInfo) -> Summary.Value:
    """Return the run's row of the HParams page (TensorBoard adds the last scalars)."""
    session = SessionStartInfo(group_name=info.name, start_time_secs=time.time())
    for key, value in info.hparams().items():
        if isinstance(value, bool):
            session.hparams[key].bool_value = value
        elif isinstance(value, str):
            session.hparams[key].string_value = value
        else:
            session.hparams[key].number_value = value
    content = HParamsPluginData(version=0, session_start_info=session).SerializeToString()
    return _page(HPARAMS, "hparams", None, content)


def _layout(info: RunInfo) -> Summary.Value:
    """Return the layout of the Custom Scalars page: returns first, memory last."""
    reports = bool(info.config.get("env", {}).get("info_metrics"))
    categories = [
        Category(
            title=title,
            chart=[
                Chart(title=name, multiline=MultilineChartContent(tag=[f"^{tag}$" for tag in tags]))
                for name, tags in charts.items()
                if reports or name != REPORTED
            ],
        )
        for title, charts in CHARTS.items()
    ]
    return _page(LAYOUT, "custom_scalars", Layout(category=categories).SerializeToString())


POLYNOMIAL = np.uint32(0x82F63B78)  # CRC-32C (Castagnoli), bit-reflected
ONES, LAST, BYTE = np.uint32(0xFFFFFFFF), np.uint32(0xFF), np.uint32(8)


def framed(data: bytes) -> bytes:
    """Return `data` as a record: uint64 length, its checksum, the data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of `data`, as the TFRecord format defines it."""
    crc = int(_crc(np.frombuffer(data, np.uint8), _table()))
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@jit
def _crc(data: Any, table: Any) -> Any:
    """Return the CRC-32C of bytes [N]; plain Python takes 37 µs for a 300-byte record, this 6."""
    crc = ONES
    for byte in data:
        crc = table[(crc ^ byte) & LAST] ^ (crc >> BYTE)
    return crc ^ ONES


@cache
def _table() -> NDArray[np.uint32]:
    """Return the CRC-32C lookup table [256]."""
    table: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1 ^ POLYNOMIAL * (table & 1)).astype(np.uint32)
    return table
