"""Weights & Biases sink: online if logged in, else offline in the run directory."""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from steadyrl.training.logging.sinks import Record, RunInfo, Sink

BUCKETS = 20


class WandB(Sink):
    """The metrics of the TensorBoard sink, under the same tags.

    wandb.init runs at the first record. If it fails it is not retried: each attempt may block
    training for minutes.
    """

    failures = (Exception,)  # service, subprocess or network: any exception

    def __init__(self, directory: Path, info: RunInfo) -> None:
        self._directory, self._info = directory, info
        self._run: Any = None
        self._init_error: Exception | None = None

    @override
    def write(self, record: Record) -> None:
        run = self._get_run()
        for step, value in record.episodes:
            run.log({"rollout/return": value}, step=step)
        values: dict[str, Any] = dict(record.scalars)
        if record.returns:
            counts = np.histogram(record.returns, BUCKETS)
            values["rollout/returns"] = importlib.import_module("wandb").Histogram(
                np_histogram=counts
            )
        run.log(values, step=record.step)

    @override
    def write_video(self, step: int, gif: bytes) -> None:
        """Ignore it: videos are large; they are in the run directory."""

    @override
    def continue_after(self, step: int) -> None:
        """Do nothing: the server resumes by run id and ignores steps that it has."""

    def _get_run(self) -> Any:
        if self._init_error is not None:
            raise self._init_error.with_traceback(None)  # the traceback would grow
        if self._run is None:
            try:
                self._run = self._init_run()
            except Exception as error:
                self._init_error = error
                raise
        return self._run

    def _init_run(self) -> Any:
        wandb: Any = importlib.import_module("wandb")  # slow: 1 s
        place = str(self._directory.resolve())
        # wandb takes the package `agents` for LLM agents and prints advice on Weave.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        return wandb.init(
            project="steadyrl",
            dir=place,
            name=self._info.name,
            # Runs of a sweep share names, so the id is from the path; a resumed run keeps its id.
            id=hashlib.sha256(place.encode()).hexdigest()[:12],
            resume="allow",
            config=dict(self._info.config),
            mode=_mode(wandb),
            settings=wandb.Settings(console="off", silent=True),
        )

    @override
    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def _mode(wandb: Any) -> str:
    """Return WANDB_MODE, or else `offline` if no API key is configured."""
    asked = os.environ.get("WANDB_MODE")
    if asked:
        return asked
    try:
        has_key = wandb.login(prompt=False)
    except TypeError:  # before version 0.31
        has_key = wandb.api.api_key is not None
    return "online" if has_key else "offline"
