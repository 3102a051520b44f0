"""Record some updates by torch.profiler, to a trace that TensorBoard and Perfetto open."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from steadyrl.agents.base import Agent
from steadyrl.core.errors import describe
from steadyrl.core.metrics import Metrics
from steadyrl.training.config.settings import ProfilerSettings

log = logging.getLogger("steadyrl")

FOLDER = "profiler"  # below the run directory


@contextmanager
def traced_updates(
    settings: ProfilerSettings, agent: Agent, directory: Path, rank: int | None
) -> Iterator[None]:
    """Record updates of the agent in this block as configured; `rank`: of several, this one."""
    if not settings.enabled:
        yield
        return
    trace = UpdateTrace(settings, agent, directory / FOLDER, rank)
    owner: Any = agent
    owner.update = trace.update
    try:
        yield
    finally:
        trace.close()  # a run that ends earlier leaves what there is


class UpdateTrace:
    """Calls of an agent's `update`: some wait, some warm up, some are recorded, and so on again.

    A call that makes no gradient step does not count. Records are of everything from the first
    recorded call to the last, the steps between them included.
    """

    def __init__(
        self, settings: ProfilerSettings, agent: Agent, folder: Path, rank: int | None
    ) -> None:
        self._update: Callable[[], Metrics | None] = agent.update
        self._folder = folder
        self._worker = "updates" if rank is None else f"updates-rank{rank}"
        self._calls = 0
        cycle = settings.wait + settings.warmup + settings.active
        self._last = cycle * settings.repeat
        cuda = [ProfilerActivity.CUDA] if agent.device.type == "cuda" else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=schedule(
                wait=settings.wait,
                warmup=settings.warmup,
                active=settings.active,
                repeat=settings.repeat,
            ),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        self._running = self._done = False

    def update(self) -> Metrics | None:
        """Call the agent's `update`, recorded or not."""
        if self._done:
            return self._update()
        if not self._running:
            self._running = True
            self._profile.start()
        with record_function("update"):
            metrics = self._update()
        if metrics is not None:
            self._calls += 1
            with warnings.catch_warnings():  # that a recording forgets the one before it
                warnings.simplefilter("ignore", UserWarning)
                self._profile.step()
            if self._calls == self._last:
                self.close()
        return metrics

    def close(self) -> None:
        """Stop recording; may be called twice."""
        running, self._running, self._done = self._running, False, True
        if running:
            self._profile.stop()

    def _write(self, recorded: Any) -> None:
        path = self._folder / f"{self._worker}.{self._calls}.pt.trace.json.gz"
        try:
            self._folder.mkdir(exist_ok=True)
            recorded.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            log.warning("cannot write the trace %s (%s): training continues", path, describe(error))
            return
        # A run may end before.
        log.info("trace up to update %d: %s (https://ui.perfetto.dev opens it)", self._calls, path)
