"""Plant leaks in sequence in a subprocess; print the warnings of each as JSON.

A subprocess, because memory freed before would hide a leak.
"""

import gc
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import torch
import yaml
from torch import nn

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.core.metrics import MetricAccumulator, record
from steadyrl.memory.settings import (
    CacheSettings,
    LeakSettings,
    MemorySettings,
    MonitorSettings,
    SlowdownSettings,
)
from steadyrl.memory.watch import MemoryWatch

matplotlib.use("Agg")
INTERVALS = 14


class Losses:
    """Leaks every loss with its autograd graph."""

    def __init__(self):
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 2))
        self.inputs = torch.zeros(32, 4)
        self.losses = []

    def interval(self):
        for _ in range(60):
            self.losses.append(self.network(self.inputs).square().mean())


class RecordedLosses(Losses):
    """The same loop with recorded metrics; must not be reported as a leak."""

    def __init__(self):
        super().__init__()
        self.metrics = MetricAccumulator()

    def interval(self):
        for _ in range(60):
            self.metrics.add(record(["loss"], self.network(self.inputs).square().mean()))
        self.metrics.flush()


class Episodes:
    """Leaks a kilobyte per episode."""

    def __init__(self):
        self.episode_log = []

    def interval(self):
        for number in range(1500):
            self.episode_log.append(number.to_bytes(1024, "big"))


class Replay:
    """A replay that appends instead of overwriting a ring."""

    def __init__(self):
        self.transitions = []

    def interval(self):
        for _ in range(200):
            self.transitions.append((np.ones((84, 84), np.uint8), 1, 0.5, False))


class Figures:
    """Leaks a figure per evaluation."""

    def interval(self):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots()
        axes.plot([1, 2, 3])
        figure.canvas.draw()


class Environments:
    """Leaks an open environment per restart."""

    def __init__(self):
        self.environments = []

    def interval(self):
        import gymnasium

        if len(self.environments) < 8:
            self.environments.append(
                gymnasium.make_vec("CartPole-v1", num_envs=1, vectorization_mode="async")
            )

    def close(self):
        for environment in self.environments:
            environment.close(terminate=True)


def alert(settings):
    leak = replace(
        settings.leak,
        warmup_samples=4,
        window_samples=30,
        max_growth_mb=6,
        max_extra_handles=3,
    )
    monitor = MonitorSettings(every_seconds=0, tree_every_seconds=0, tensors_every_seconds=1000)
    return replace(settings, leak=leak, monitor=monitor)


def shipped():
    path = Path(__file__).parents[2] / "configs/memory/default.yaml"
    plain = yaml.safe_load(path.read_text())
    return MemorySettings(
        **{
            **plain,
            "monitor": MonitorSettings(**plain["monitor"]),
            "cache": CacheSettings(**plain["cache"]),
            "leak": LeakSettings(**plain["leak"]),
            "slowdown": SlowdownSettings(**plain["slowdown"]),
        }
    )


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, log_record):
        self.lines.append(log_record.getMessage())


def watch_over(leak, settings):
    heard = Lines()
    logging.getLogger("steadyrl").addHandler(heard)
    watch = MemoryWatch(settings, torch.device("cpu"))
    stopped = None
    try:
        for number in range(INTERVALS):
            leak.interval()
            watch.measure(1000 * (number + 1))
    except MemoryBudgetError as error:
        stopped = str(error)
    watch.close()
    logging.getLogger("steadyrl").removeHandler(heard)
    if hasattr(leak, "close"):
        leak.close()
    return {"warnings": heard.lines, "stopped": stopped}


def main():
    settings = alert(shipped())
    RecordedLosses().interval()  # warm-up of the libraries
    gc.freeze()  # tensor censuses skip the libraries' objects
    leaks = [RecordedLosses(), Losses(), Episodes(), Replay(), Figures(), Environments()]
    said = {type(leak).__name__: watch_over(leak, settings) for leak in leaks}
    stop = replace(settings, leak=replace(settings.leak, action="stop", tracemalloc=True))
    trace = Episodes()
    said["Traced"] = watch_over(trace, stop)
    leaks.append(trace)  # until the end: nothing may be freed in between
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
