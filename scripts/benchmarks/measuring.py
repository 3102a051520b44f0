"""Shared parts of benchmarks: alternating contestants, timers around methods, open runs."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from steadyrl.agents.base import Agent
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.config.settings import CONFIGS
from steadyrl.training.run.collector import build_collector
from steadyrl.training.run.job import accept
from steadyrl.training.run.run import Run
from steadyrl.training.setup import open_run


def take_turns(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Return seconds per call of every contestant and round, without the first round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, call in contestants.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: times[1:] for name, times in seconds.items()}


def median_ratio(theirs: list[float], ours: list[float]) -> float:
    """Return the median over rounds of their time divided by ours."""
    return median(one / two for one, two in zip(theirs, ours, strict=True))


def print_speeds(seconds: Mapping[str, list[float]], steps: int, peer: str) -> None:
    """Print a Markdown table of steps per second, with ratios to the peer if it took part."""
    theirs = seconds.get(peer)
    print(f"\n| contestant | steps/s | against {peer} |\n|---|---:|---:|")
    for name, times in seconds.items():
        against = "-" if theirs is None else f"{median_ratio(theirs, times):.2f}x"
        print(f"| {name} | {steps / median(times):,.0f} | {against} |")


class BlocksUntil:
    """A run as a collector sees it, whose blocks end at step `end`."""

    def __init__(self, run: Run, end: int) -> None:
        self._run, self._end = run, end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    @property
    def steps_until_next_event(self) -> int:
        """Steps until the run's next event or `end`."""
        return min(self._run.steps_until_next_event, self._end - self._run.steps)


class Ours:
    """An open run that can be trained further, exactly as `train.py` does."""

    def __init__(self, run: Run, env: VectorEnv, agent: Agent) -> None:
        self.run, self.env, self.agent = run, env, agent
        self._collector = build_collector(run, env, agent)

    def train(self, steps: int) -> None:
        """Train for `steps` more steps, or until a signal arrives."""
        end = self.run.steps + steps
        self._collector.run = cast(Run, BlocksUntil(self.run, end))
        while self.run.steps < end:
            collected = self._collector.collect()
            if collected is None:
                break
            self.run.on_steps(collected)


@contextmanager
def ours(*overrides: str) -> Iterator[Ours]:
    """Open a run with these overrides in a temporary directory."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = hydra.compose("config", list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    with tempfile.TemporaryDirectory() as folder:
        config.run_dir = str(Path(folder) / "run")
        del config.hydra
        with open_run(accept(config)) as (run, env, agent):
            # Log lines of several runs would mix.
            logging.getLogger("steadyrl").handlers.clear()
            yield Ours(run, env, agent)


class Stopwatch:
    """Time spent in wrapped methods."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Add the time of every call of `owner.method` to `name`."""
        inner: Callable[..., Any] = getattr(owner, method)
        self.seconds.setdefault(name, 0.0)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - begin
            return result

        setattr(owner, method, timed)
