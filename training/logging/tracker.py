"""A sink for experiment trackers (Weights & Biases, Trackio): one history, also of resumed runs."""

from __future__ import annotations

import hashlib
import uuid
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.core.files import read_lines, read_regular, write_atomic
from steadyrl.core.safe_parsing import from_json
from steadyrl.training.logging.sinks import (
    LONGEST_LINE,
    METRICS,
    Record,
    RunInfo,
    Sink,
    histogram,
)

NOTHING = -1  # the last step of a run without any
TOKEN = "tracker-token"  # file of the run directory: tells its run from others that were there
LONGEST_TOKEN = 100  # bytes


class Tracker(Sink):
    """The metrics of the TensorBoard sink under the same tags, each step once.

    The tracker's run is opened at the first record; if that fails it is not retried, because each
    attempt may block training for minutes. A tracker cannot drop the steps after the resumed one,
    so a resumed run does not send again what the tracker has. What the tracker lacks, because the
    run was killed before it was sent, is sent from metrics.jsonl.
    """

    failures = (Exception,)  # service, subprocess or network: any exception

    def __init__(self, directory: Path, info: RunInfo) -> None:
        self.directory, self.info = directory, info
        self._last = NOTHING  # step that the tracker has
        self._resumed_at: int | None = None
        self._opened = False
        self._error: Exception | None = None  # of opening

    @abstractmethod
    def open(self, run_id: str) -> int:
        """Open the tracker's run; return the last step it has, NOTHING for a new one."""

    @abstractmethod
    def send(self, step: int, values: Mapping[str, Any], *, complete: bool) -> None:
        """Send values of a step; `complete`: the last ones of this step."""

    @abstractmethod
    def histogram(self, counts: NDArray[Any], edges: NDArray[Any]) -> Any:
        """Return a histogram as the tracker takes it."""

    @abstractmethod
    def finish(self) -> None:
        """Close the tracker's run, once everything is sent."""

    @override
    def write(self, record: Record) -> None:
        self._open_once()
        if self._resumed_at is not None:
            self._send_missing(self._resumed_at)
            self._resumed_at = None
        if record.step <= self._last:
            return
        values: dict[str, Any] = dict(record.scalars)
        for step, value in record.episodes:
            if step == record.step:  # the step is complete once it is sent
                values["rollout/return"] = value
            elif step > self._last:
                self.send(step, {"rollout/return": value}, complete=False)
        if record.returns:
            values["rollout/returns"] = self.histogram(*histogram(record.returns))
        self._send(record.step, values)

    @override
    def write_video(self, step: int, gif: bytes) -> None:
        """Ignore it: videos are large; they are in the run directory."""

    @override
    def continue_after(self, step: int) -> None:
        self._resumed_at = step

    @override
    def close(self) -> None:
        if self._opened:
            self._opened = False
            self.finish()

    def _open_once(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # the traceback would grow
        if self._opened:
            return
        try:
            self._last = self.open(self._run_id())
        except Exception as error:
            self._error = error
            raise
        self._opened = True

    def _run_id(self) -> str:
        """Return the id of the tracker's run: a resumed run's own, a new one otherwise.

        A copied directory is another run, so the path is part of it.
        """
        file, token = self.directory / TOKEN, b""
        if self._resumed_at is not None:
            with suppress(FileNotFoundError):
                token = read_regular(file, LONGEST_TOKEN)
        if not token:
            token = uuid.uuid4().hex.encode()
            write_atomic(file, token)
        place = str(self.directory.resolve()).encode()
        return hashlib.sha256(place + token).hexdigest()[:12]

    def _send_missing(self, until: int) -> None:
        """Send the lines of metrics.jsonl after the last step sent."""
        for line, _ in read_lines(self.directory / METRICS, LONGEST_LINE):
            try:
                values = from_json(line)
                step = values.pop("step")
                values.pop("wall_seconds")
                missing = self._last < step <= until
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a corrupted line
            if missing:
                self._send(step, values)

    def _send(self, step: int, values: Mapping[str, Any]) -> None:
        self.send(step, values, complete=True)
        self._last = step
