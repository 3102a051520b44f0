"""Write TensorBoard event files directly: no thread, no queue, errors are raised.

A file is a sequence of records: length, payload, and a checksum of each. TensorBoard's own writer
imports every file system it supports, which adds 0.2 s to the start-up.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
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
from steadyrl.training.logging.sinks import Record, RunInfo, Sink, histogram

HPARAMS, LAYOUT = (
    "_hparams_/session_start_info",
    "custom_scalars__config__",
)
BETWEEN_HISTOGRAMS = 1.0  # seconds: one costs as much as all else in a record
RGB = 3  # TensorBoard's number of this colour space
EVALUATION, OF_EVALUATION = "eval", "eval/"  # directory and tags of evaluations
RETURNS = "returns"  # directory of the HParams row of a run without evaluations
RETURN = "episode/return"  # of training and of evaluations, in one chart
EVENTS = "events.out.tfevents"  # prefix of event file names


class EventFile:
    """One event file: one record per event."""

    def __init__(self, directory: Path) -> None:
        name = f"{EVENTS}.{_next_stamp(directory)}.{socket.gethostname()}.{getpid()}"
        path = directory / name
        self._stream = path.open("xb")
        try:
            self.write(Event(file_version="brain.Event:2"))
        except OSError:  # a full disk: each later line would leave another empty file
            with suppress(OSError):
                self.close()
            with suppress(OSError):
                path.unlink()
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


class EventFiles:
    """One of TensorBoard's runs: its directory and files, a new one after an error or a resume."""

    def __init__(
        self,
        directory: Path,
        pages: Callable[[bool], Sequence[Summary.Value]],
        *,
        makes_directory: bool = False,
    ) -> None:
        self.directory, self._makes_directory = directory, makes_directory
        self._pages: Callable[[bool], Sequence[Summary.Value]] | None = pages  # until written
        self._file: EventFile | None = None
        self._begun: bool | None = None  # whether it had files before; None: not known yet
        self._has_start_event = False

    def write(self, *events: Event) -> None:
        """Append events, to a new file if none is open."""
        try:
            (self._file or self._open(0)).write(*events)
        except OSError:
            self.close()
            raise

    def continue_after(self, step: int) -> None:
        """Let TensorBoard drop what was logged after `step`."""
        try:
            self._open(step, resumed=True)
        except OSError:
            self.close()
            raise

    def _open(self, step: int, *, resumed: bool = False) -> EventFile:
        """Open a new event file; the first one also gets the text pages, layout and HParams."""
        if self._makes_directory:
            self.directory.mkdir(exist_ok=True)
        if self._begun is None:
            self._begun = any(self.directory.glob(f"{EVENTS}.*"))
        self._file = file = EventFile(self.directory)
        if resumed or not self._has_start_event:
            # SessionLog.START makes TensorBoard drop the events of later steps in earlier files. It
            # ignores the first START it reads, so the first file has one too.
            start = SessionLog(status=SessionLog.START)
            file.write(Event(step=step + 1 if resumed else 0, session_log=start))
            self._has_start_event = True
        if self._pages is not None and (pages := self._pages(self._begun)):
            file.write(_event(step if self._begun else 0, pages))
        self._pages = None
        return file

    def close(self) -> None:
        """Close the file; a truncated record would hide what follows, so the next one is new."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


class TensorBoard(Sink):
    """Scalars, histograms, the configuration and the HParams of a run.

    Evaluations are a run of their own, `eval` below the run's: so they have a colour of their own.
    The run's row of the HParams page is theirs, whose metrics are returns only. Without evaluations
    it is that of another run below, `returns`, which gets the last return: of a run with all tags,
    the page would tick those of memory.
    """

    def __init__(self, directory: Path, info: RunInfo | None) -> None:
        self._evaluates = bool(info and info.config.get("eval", {}).get("every"))

        def pages(begun: bool, *, of_evaluation: bool) -> list[Summary.Value]:
            if info is None:
                return []
            found = [] if of_evaluation else [_command(info), _configuration(info)]
            if not begun:  # a resumed run keeps the layout and HParams of its first file
                found += [_hparams(info)] if of_evaluation and self._evaluates else []
                found += [] if of_evaluation else [_layout(info)]
            return found

        def row(begun: bool) -> list[Summary.Value]:
            return [] if begun or info is None else [_hparams(info)]

        self._training = EventFiles(directory, partial(pages, of_evaluation=False))
        self._evaluation = EventFiles(
            directory / EVALUATION, partial(pages, of_evaluation=True), makes_directory=True
        )
        self._returns = EventFiles(directory / RETURNS, row, makes_directory=True)
        self._last_return: list[Event] = []
        self._next_histogram = 0.0  # in seconds since the run started

    @override
    def write(self, record: Record) -> None:
        events = [_event(at, _scalars({"rollout/return": value})) for at, value in record.episodes]
        evaluated = {tag: v for tag, v in record.scalars.items() if tag.startswith(OF_EVALUATION)}
        trained = {tag: v for tag, v in record.scalars.items() if tag not in evaluated}
        values = _scalars(_with_return(trained, "rollout/return_mean"))
        if record.returns and record.wall_seconds >= self._next_histogram:
            values.append(_histogram("rollout/returns", record.returns))
            self._next_histogram = record.wall_seconds + BETWEEN_HISTOGRAMS
        self._training.write(*events, *_event_of(record.step, values))
        last = [value for value in values if value.tag == RETURN]
        if last and not self._evaluates:
            if not self._last_return:
                self._returns.write()  # the row is there from the first return on
            self._last_return = [_event(record.step, last)]
        if evaluated or self._evaluates:
            values = _scalars(_with_return(evaluated, "eval/return_mean"))
            self._evaluation.write(*_event_of(record.step, values))

    @override
    def write_video(self, step: int, gif: bytes) -> None:
        width, height = (int.from_bytes(gif[at : at + 2], "little") for at in (6, 8))
        image = Summary.Image(height=height, width=width, colorspace=RGB, encoded_image_string=gif)
        self._evaluation.write(_event(step, [Summary.Value(tag="eval/film", image=image)]))

    @override
    def continue_after(self, step: int) -> None:
        self._training.continue_after(step)
        if self._evaluates or self._evaluation.directory.exists():
            self._evaluation.continue_after(step)
        if self._returns.directory.exists():
            self._returns.continue_after(step)

    @override
    def close(self) -> None:
        last, self._last_return = self._last_return, []
        try:
            if last:
                self._returns.write(*last)
        finally:
            for files in (self._training, self._evaluation, self._returns):
                files.close()


def _with_return(scalars: Mapping[str, float], tag: str) -> Mapping[str, float]:
    """Return scalars with the return under the tag of both training and evaluation.

    Of all tags it comes first in the alphabet, so TensorBoard opens on it.
    """
    return scalars if tag not in scalars else {RETURN: scalars[tag], **scalars}


def _event_of(step: int, values: Sequence[Summary.Value]) -> list[Event]:
    """Return the event of these values; none if there are no values."""
    return [_event(step, values)] if values else []


def _event(step: int, values: Sequence[Summary.Value]) -> Event:
    return Event(step=step, summary=Summary(value=values))


def _scalars(values: Mapping[str, float]) -> list[Summary.Value]:
    return [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]


def _histogram(tag: str, values: Sequence[float]) -> Summary.Value:
    counts, edges = histogram(values)
    proto = HistogramProto(
        min=min(values),
        max=max(values),
        num=len(values),
        sum=float(np.sum(values)),
        sum_squares=float(np.square(values).sum()),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )
    return Summary.Value(tag=tag, histo=proto)


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
