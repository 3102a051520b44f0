"""Run the trainer as a process of its own, in environments that break too, and look at it from
outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import psutil

from steadyrl.memory.process import read_process_memory

ROOT = Path(__file__).resolve().parents[2]


class Sample(NamedTuple):
    """The process tree at one moment; `step` is the last that was logged."""

    seconds: float
    step: int
    pss: int
    own: int  # of it, what is no mapped file, whose share depends on what else runs here
    cpu_seconds: float
    open_files: int
    threads: int
    children: int


class Soak(NamedTuple):
    """One run: how it was started, how it ended, and what was seen."""

    title: str
    command: list[str]
    exit_code: int
    samples: list[Sample]
    logged: list[dict[str, float]]  # the lines of metrics.jsonl
    restarts: int = 0  # rebuilt environments, those of evaluations included


def soak(title: str, overrides: Sequence[str], run_dir: Path, every_seconds: float) -> Soak:
    """Train to the end, sampling every so many seconds."""
    command = [sys.executable, str(ROOT / "train.py"), *overrides, f"run_dir={run_dir}"]
    samples: list[Sample] = []
    log = MetricsTail(run_dir / "metrics.jsonl")
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            log.read()
            sample = take_sample(watched, time.perf_counter() - start, log.step)
            if sample is not None:
                samples.append(sample)
            try:
                process.wait(every_seconds)
            except subprocess.TimeoutExpired:
                continue
    log.read()
    restarts = count_restarts(run_dir / "train.log")
    return Soak(title, command[1:], process.returncode, samples, log.lines, restarts)


def count_restarts(log: Path) -> int:
    """Count the rebuilt environments."""
    if not log.exists():
        return 0
    with log.open() as lines:
        return sum("; rebuilding it" in line for line in lines)


def take_sample(process: psutil.Process, seconds: float, step: int) -> Sample | None:
    """Sum over the tree; None when it is gone."""
    try:
        tree = [process, *process.children(recursive=True)]
    except psutil.Error:
        return None
    members = [found for found in map(_look_at, tree) if found is not None]
    if not members:
        return None
    pss, own, cpu, files, threads = (sum(column) for column in zip(*members, strict=True))
    return Sample(
        seconds, step, int(pss), int(own), cpu, int(files), int(threads), len(members) - 1
    )


def _look_at(process: psutil.Process) -> tuple[float, ...] | None:
    """Return memory, CPU seconds, open files and threads of one process; None if it vanished."""
    try:
        share, times = read_process_memory(process), process.cpu_times()
        if share is None:
            return None
        # With that of children which have ended, so that the sum never falls.
        cpu = times.user + times.system + times.children_user + times.children_system
        return (share.pss, share.own, cpu, process.num_fds(), process.num_threads())
    except psutil.Error:
        return None


class MetricsTail:
    """The lines of a metrics.jsonl that is still being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.lines: list[dict[str, float]] = []

    @property
    def step(self) -> int:
        """Last step that was logged."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    def read(self) -> None:
        """Take in the complete lines that are new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._position += len(complete)
        self.lines += [json.loads(line) for line in complete.splitlines()]


class Crashing(gym.Wrapper):
    """Raise after so many steps; what is built in its place lives as long."""

    def __init__(self, env: gym.Env[Any, Any], every: int) -> None:
        super().__init__(env)
        self._left = every

    def step(self, action: Any) -> Any:
        """Step the environment, or break."""
        if not self._left:
            raise RuntimeError("the simulator crashed, as it was asked to")
        self._left -= 1
        return self.env.step(action)


def make(base: str, every: int, **kwargs: Any) -> gym.Env[Any, Any]:
    """Make the environment called `base` so that it breaks."""
    return Crashing(gym.make(base, disable_env_checker=True, **kwargs), every)


gym.register("Crashing-v0", "scripts.soaking.sampling:make")
