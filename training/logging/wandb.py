"""Weights & Biases as one more sink: online with an account, in the run directory without."""

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
    """What TensorBoard shows, under the same names.

    It is begun with the first record. If that fails it is not tried again: each try may take
    minutes, and every one of them would be taken from training.
    """

    failures = (Exception,)  # a service, its process, a network: any of them, and anyhow

    def __init__(self, directory: Path, info: RunInfo) -> None:
        self._directory, self._info = directory, info
        self._run: Any = None
        self._refused: Exception | None = None

    @override
    def write(self, record: Record) -> None:
        run = self._begun()
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
    def film(self, step: int, gif: bytes) -> None:
        """Leave it out: films are large, and lie in the run's directory."""

    @override
    def continue_after(self, step: int) -> None:
        """Let the servers go on: they know the run by its directory, and ignore what they have."""

    def _begun(self) -> Any:
        if self._refused is not None:
            raise self._refused.with_traceback(None)  # or it would grow with every raise
        if self._run is None:
            try:
                self._run = self._begin()
            except Exception as error:
                self._refused = error
                raise
        return self._run

    def _begin(self) -> Any:
        wandb: Any = importlib.import_module("wandb")  # takes a second, of those who asked for it
        place = str(self._directory.resolve())
        # A package called `agents` is taken for that of language models, and advice is printed.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        return wandb.init(
            project="steadyrl",
            dir=place,
            name=self._info.name,
            # Directories of sweeps share their names; a continued run is one with what it was.
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
    """Return what was asked for, or else offline where nobody would be asked for a key."""
    asked = os.environ.get("WANDB_MODE")
    if asked:
        return asked
    try:
        known = wandb.login(prompt=False)
    except TypeError:  # before version 0.31
        known = wandb.api.api_key is not None
    return "online" if known else "offline"
