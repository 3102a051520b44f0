"""Whole runs that become slower name the part that does, or who takes their processor."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import environment

ROOT = Path(__file__).parents[3]
DQN = (
    "agent=dqn", "env.id=slowing_envs:Slowing-v0", "env.backend=sync", "eval.every=0", "threads=1",
    "total_steps=1_000_000", "log.every=30", "agent.compile=false", "agent.hidden=[32]",
    "agent.learning_starts=200", "agent.train_every=1", "agent.updates_per_train=1",
)  # fmt: skip
WAITS = "env.kwargs.seconds=0.03"
ASYNC = ("env.backend=async", "env.num_envs=3", "agent.train_every=3")
# Seconds of a run until neighbours start, and at which one without a warning is ended.
NEIGHBOURS, LIMIT = 30.0, 400.0


def warned(folder, *overrides, neighbour=False):
    """Return the first warning of a run on one core; it ends then."""
    core = max(os.sched_getaffinity(0))
    pin = {"preexec_fn": lambda: os.sched_setaffinity(0, {core})}
    nice = ("nice", "-n", "2") if neighbour else ()  # the system prefers the neighbours
    command = [
        *nice,
        sys.executable,
        str(ROOT / "train.py"),
        *DQN,
        f"run_dir={folder / 'run'}",
        *overrides,
    ]
    spin = [sys.executable, "-c", "while True: pass"]
    log, begin, found, others = folder / "run/train.log", time.monotonic(), [], []
    run = subprocess.Popen(command, cwd=folder, env=environment(), **pin)
    try:
        while not found and run.poll() is None and time.monotonic() - begin < LIMIT:
            if neighbour and not others and seconds_of(folder / "run") > NEIGHBOURS:
                others = [subprocess.Popen(spin, **pin) for _ in range(3)]
            time.sleep(0.5)
            lines = log.read_text().splitlines() if log.exists() else []
            found = [line for line in lines if "training became slower" in line]
    finally:
        for other in others:
            other.kill()
            other.wait()
        run.terminate()
        run.wait()
    print(*found, sep="\n")
    return found[0] if found else ""


def seconds_of(directory):
    """Return the seconds that a run has trained for at its last log line."""
    file = directory / "metrics.jsonl"
    lines = file.read_text().splitlines()[:-1] if file.exists() else []  # the last may be partial
    return json.loads(lines[-1])["wall_seconds"] if lines else 0.0


def longer(line):
    """Return the parts that a warning names, most first."""
    return re.findall(r"(\w+) [\d.,]+ to [\d.,]+ ms", line)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen")
@pytest.mark.parametrize(
    ("part", "overrides"),
    [
        ("environment", (WAITS, "env.kwargs.growth=60")),
        ("environment", (WAITS, "env.kwargs.after=25")),
        ("environment", (WAITS, "env.kwargs.after=25", *ASYNC, "env.kwargs.worker=environment-1")),
        ("update", ("callbacks=[slowing_envs:SlowLearning]",)),
        ("callbacks", ("callbacks=[slowing_envs:SlowCallback]",)),
    ],
    ids=["growing", "environment", "worker", "learning", "callback"],
)
def test_the_slower_part_of_a_run_is_named(tmp_path, part, overrides):
    line = warned(tmp_path, *overrides)
    assert longer(line)[:1] == [part]
    assert "Other processes take" not in line


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen")
def test_other_processes_on_the_same_core_are_named(tmp_path):
    assert "Other processes take the processor" in warned(tmp_path, neighbour=True)
