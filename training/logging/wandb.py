"""Weights & Biases sink: online if logged in, else offline in the run directory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.training.config.settings import WandbSettings
from steadyrl.training.logging.sinks import RunInfo
from steadyrl.training.logging.tracker import NOTHING, Tracker


class WandB(Tracker):
    """A run of `log.wandb.project`."""

    name = "Weights & Biases"

    def __init__(self, directory: Path, info: RunInfo, settings: WandbSettings) -> None:
        super().__init__(directory, info)
        self._settings = settings
        self._run: Any = None

    @override
    def open(self, run_id: str) -> int:
        wandb: Any = importlib.import_module("wandb")  # slow: 1 s
        # wandb takes the package `agents` for LLM agents and prints advice on Weave.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        self._run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            group=self._settings.group,
            tags=list(self._settings.tags) or None,
            dir=str(self.directory.resolve()),
            name=self.info.name,
            id=run_id,
            resume="allow",
            config=dict(self.info.config),
            mode=_mode(wandb),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Offline nothing is resumed: the newest file has the whole history, and `wandb sync` of an
        # older one would overwrite it.
        return int(self._run.step) - 1 if self._run.resumed else NOTHING

    @override
    def send(self, step: int, values: Mapping[str, Any], *, complete: bool) -> None:
        # Without `commit`, a step is sent with the next one.
        self._run.log(dict(values), step=step, commit=complete)

    @override
    def histogram(self, counts: NDArray[Any], edges: NDArray[Any]) -> Any:
        return importlib.import_module("wandb").Histogram(np_histogram=(counts, edges))

    @override
    def finish(self) -> None:
        self._run.finish()


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
