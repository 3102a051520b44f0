"""Trackio sink: a local database that `trackio show` displays, or a server of one's own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.training.config.settings import TrackioSettings
from steadyrl.training.logging.sinks import RunInfo
from steadyrl.training.logging.tracker import Tracker


class Trackio(Tracker):
    """A run of `log.trackio.project`."""

    name = "Trackio"

    def __init__(self, directory: Path, info: RunInfo, settings: TrackioSettings) -> None:
        super().__init__(directory, info)
        self._settings = settings
        self._trackio: Any = None
        self._run: Any = None

    @override
    def open(self, run_id: str) -> int:
        self._trackio = importlib.import_module("trackio")  # slow: 1 s
        with redirect_stdout(StringIO()):  # it prints how to show the project
            self._run = self._trackio.init(
                project=self._settings.project,
                # A run is resumed by its name, which another run must not have.
                name=f"{self.info.name}-{run_id[:6]}",
                group=self._settings.group,
                config=dict(self.info.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return int(self._run._next_step) - 1  # not public; a test reads it from a real run

    @override
    def send(self, step: int, values: Mapping[str, Any], *, complete: bool) -> None:
        self._run.log(dict(values), step=step)

    @override
    def histogram(self, counts: NDArray[Any], edges: NDArray[Any]) -> Any:
        return self._trackio.Histogram(np_histogram=(counts, edges))

    @override
    def finish(self) -> None:
        with redirect_stdout(StringIO()):
            self._trackio.finish()
