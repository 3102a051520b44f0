"""Run the trainer in a subprocess, optionally with crashing environments, and sample it."""

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
    """Measures of the process tree at one time; `step` is the last logged one."""

    seconds: float
    step: int
    pss: int
    own: int  # PSS without mapped files, whose part depends on other programs
    cpu_seconds: float
    open_files: int
    threads: int
    children: int


class Soak(NamedTuple):
    """One run: command, exit code, samples and metrics."""

    title: str
    command: list[str]
    exit_code: int
    samples: list[Sample]
    logged: list[dict[str, float]]  # lines of metrics.jsonl
    restarts: int = 0  # rebuilt environments, evaluation included


def soak(title: str, overrides: Sequence[str], run_dir: Path, every_seconds: float) -> Soak:
    """Train to the end, sampling the process tree every `every_seconds`."""
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
    """Return the number of rebuilt environments."""
    if not log.exists():
        return 0
    with log.open() as lines:
        return sum("; rebuilding it" in line for line in lines)


def take_sample(process: psutil.Process, seconds: float, step: int) -> Sample | None:
    """Return the sums over the process tree; None if it has ended."""
    try:
        tree = [process, *process.children(recursive=True)]
    except psutil.Error:
        return None
    members = [found for found in map(_measure, tree) if found is not None]
    if not members:
        return None
    pss, own, cpu, files, threads = (sum(column) for column in zip(*members, strict=True))
    return Sample(
        seconds, step, int(pss), int(own), cpu, int(files), int(threads), len(members) - 1
    )


def _measure(process: psutil.Process) -> tuple[float, ...] | None:
    """Return PSS, own memory, CPU seconds, open files, threads; None if the process ended."""
    try:
        usage, times = read_process_memory(process), process.cpu_times()
        if usage is None:
            return None
        # Ended children included, so that the sum is monotonic.
        cpu = times.user + times.system + times.children_user + times.children_system
        return (usage.pss, usage.own, cpu, process.num_fds(), process.num_threads())
    except psutil.Error:
        return None


class MetricsTail:
    """Reads the lines of a metrics.jsonl that is still being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.lines: list[dict[str, float]] = []

    @property
    def step(self) -> int:
        """Last logged step."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    def read(self) -> None:
        """Read the new complete lines."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._position += len(complete)
        self.lines += [json.loads(line) for line in complete.splitlines()]


class Crashing(gym.Wrapper):
    """Raises after `every` steps; so does its replacement."""

    def __init__(self, env: gym.Env[Any, Any], every: int) -> None:
        super().__init__(env)
        self._left = every

    def step(self, action: Any) -> Any:
        """Step the environment, or raise."""
        if not self._left:
            raise RuntimeError("the simulator crashed (on purpose)")
        self._left -= 1
        return self.env.step(action)


def make(base: str, every: int, **kwargs: Any) -> gym.Env[Any, Any]:
    """Make the environment `base`, wrapped to crash."""
    return Crashing(gym.make(base, disable_env_checker=True, **kwargs), every)


gym.register("Crashing-v0", "scripts.soaking.sampling:make")
