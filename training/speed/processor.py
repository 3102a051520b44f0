"""How much of the processor a run gets: CPU time, waiting for a core, throttling, clock rate."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple


class ProcessorTimes(NamedTuple):
    """Seconds so far, and the clock rate now; None where the system does not tell."""

    cpu: float  # of this process and its workers
    waited: float | None  # of the training thread and its slowest worker, ready but without a core
    throttled: float | None  # in which a control group's CPU limit stopped the processes
    mhz: float | None


def read_processor(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> ProcessorTimes:
    """Return the times of this process, read in some 0.1 ms."""
    own = _schedule(proc / "thread-self/schedstat")
    pids = [child.pid for child in multiprocessing.active_children()]
    workers = [found for pid in pids if (found := _schedule(proc / f"{pid}/schedstat"))]
    waited = None if own is None else own[1] + max((waits for _, waits in workers), default=0.0)
    cpu = time.process_time() + sum(ran for ran, _ in workers)
    return ProcessorTimes(cpu, waited, _throttled(proc, sys), _clock_rate(sys))


def _schedule(path: Path) -> tuple[float, float] | None:
    """Return seconds on a core, and ready without one, of a process's first thread."""
    numbers = _text(path).split()
    return (int(numbers[0]) / 1e9, int(numbers[1]) / 1e9) if len(numbers) == 3 else None


def _throttled(proc: Path, sys: Path) -> float | None:
    """Return the seconds of the control group above this process that was throttled longest."""
    found = []
    for group in _cpu_groups(proc, sys):
        stat = dict(line.split(maxsplit=1) for line in _text(group / "cpu.stat").splitlines())
        if "throttled_usec" in stat:
            found.append(int(stat["throttled_usec"]) / 1e6)
        elif "throttled_time" in stat:  # version 1
            found.append(int(stat["throttled_time"]) / 1e9)
    return max(found, default=None)


def _cpu_groups(proc: Path, sys: Path) -> Iterator[Path]:
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)  # 1:cpu,cpuacct:/docker/abc or 0::/user.slice
        if not controllers or "cpu" in controllers.split(","):
            below = Path(group.lstrip("/"))
            root = sys / "fs/cgroup" / controllers
            yield from (root / part for part in (below, *below.parents))


def _clock_rate(sys: Path) -> float | None:
    """Return the mean clock rate of the cores that this process may use."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    files = (sys / f"devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq" for core in cores)
    rates = [int(text) / 1e3 for file in files if (text := _text(file).strip()).isdigit()]
    return mean(rates) if rates else None


def _text(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""
