"""Signals to the process group of a run at any moment: it ends and can be resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import command
import pytest
import warm

from steadyrl.training.checkpoints.store import Checkpoints

QUICK = (
    "device=cpu", "threads=1", "agent.compile=false", "agent.hidden=[16]", "run_dir=run",
    "resume=auto", "total_steps=1e9", "checkpoint.every=100", "eval.every=0", "log.every=1000",
    "memory.monitor.tensors_every_seconds=1000", "env.id=telling_env:Telling-v0",
    "env.kwargs.file=steps",
)  # fmt: skip
PPO = ("agent=ppo", "env.num_envs=2", "agent.rollout_steps=64", "agent.minibatches=4")
DQN = ("agent=dqn", "agent.learning_starts=100", "agent.batch_size=16", "agent.train_every=4")
LIMIT = 60.0  # seconds; these runs would take days


CACHES = ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")


class FreshProcess:
    """A run in its own process group, with empty caches and a fresh interpreter."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(command.ROOT / "train.py"), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
            env=command.environment() | dict.fromkeys(CACHES, str(folder / "cache")),
            start_new_session=True,
        )  # fmt: skip
        self.pid, self.communicate = self._process.pid, self._process.communicate
        self.stdout = self._process.stdout

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def is_over(self, within: float) -> bool:
        try:
            self._process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        return True


class Moment(NamedTuple):
    """A moment of a run at which the signal is sent."""

    arguments: tuple[str, ...]
    come: Callable[[Any, Path], bool]  # whether the moment has come
    seconds: float  # random delay afterwards
    begun: bool = True  # whether a run directory exists
    afresh: bool = False


def stepped(_: Any, folder: Path) -> bool:
    return (folder / "steps").exists()


def saving(_: Any, folder: Path) -> bool:
    return any((folder / "run" / "checkpoints").glob(".writing*"))


def saved(_: Any, folder: Path) -> bool:
    return any((folder / "run" / "checkpoints").glob("step-*"))


def compiling(process: FreshProcess, _: Path) -> bool:
    assert process.stdout is not None
    return "compiling the update" in process.stdout.readline()


def handled(process: Any, _: Path) -> bool:
    """Return whether the process handles SIGTERM: before that, the system itself ends it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> signal.SIGTERM - 1 & 1)


MOMENTS = {
    "importing": Moment(DQN, handled, 3.0, begun=False, afresh=True),
    "starting": Moment(PPO, handled, 0.6, begun=False),
    "starting workers": Moment(
        (*PPO, "env.backend=async", "env.kwargs.made=true", "env.kwargs.hold=true"),
        stepped, 0.3, begun=False,
    ),
    "collecting": Moment((*DQN, "env.backend=async", "env.num_envs=2"), saved, 0.5),
    "saving": Moment((*PPO, "checkpoint.every=20"), saving, 0.0),
    "evaluating": Moment(
        (*DQN, "eval.every=300", "eval.episodes=1000000", "env.kwargs.resets=300"), stepped, 0.5
    ),
    "an update of PPO": Moment(
        (*PPO, "agent.rollout_steps=512", "agent.minibatches=128", "agent.epochs=1000",
         "env.kwargs.steps=460"),
        stepped, 0.5,
    ),
    "an update of DQN": Moment(
        (*DQN, "agent.updates_per_train=1000000", "env.kwargs.steps=101"), stepped, 0.5
    ),
    "compiling": Moment((*PPO, "agent.compile=true"), compiling, 6.0, afresh=True),
}  # fmt: skip


def signalled(folder: Path, moment: Moment, number: int, generator: random.Random) -> float:
    """Send a signal to a run's process group; return the seconds until all its processes ended."""
    arguments = [*QUICK, *moment.arguments]
    process: Any = (FreshProcess if moment.afresh else warm.Process)(folder, arguments)
    while not moment.come(process, folder):
        assert not process.is_over(0.001), process.communicate()
    assert not process.is_over(generator.uniform(0.0, moment.seconds)), process.communicate()
    begin = time.perf_counter()
    os.killpg(process.pid, number)
    if not process.is_over(LIMIT):
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"still there: {process.communicate()}")
    out, err = process.communicate()  # until the last worker has closed its output
    seconds = time.perf_counter() - begin
    assert process.returncode == 128 + number, out + err
    assert "Traceback" not in out + err
    return seconds


def assert_resumable(folder: Path, moment: Moment) -> None:
    """Check that everything is saved, or that nothing was to be saved."""
    directory = folder / "run"
    if not moment.begun and not directory.exists():
        return
    summary = json.loads((directory / "summary.json").read_text())
    newest = next(Checkpoints(directory / "checkpoints", keep=2).iter_valid(lambda metadata: None))
    assert (summary["status"], summary["steps"]) == ("interrupted", newest.step)
    assert not list((directory / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("name", "number"),
    [("an update of PPO", signal.SIGTERM), ("starting workers", signal.SIGINT)],
    ids=["update", "workers"],
)
def test_a_signal_to_the_process_group_loses_nothing(
    tmp_path: Path, name: str, number: int
) -> None:
    signalled(tmp_path, MOMENTS[name], number, random.Random(0))
    assert_resumable(tmp_path, MOMENTS[name])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_forty_signals_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    generator, seconds = random.Random(0), defaultdict(list)
    names = [*MOMENTS] * 4 + ["saving", "starting", "evaluating", "compiling"]
    for index, name in enumerate(names):
        folder = tmp_path / str(index)
        folder.mkdir()
        number = generator.choice([signal.SIGTERM, signal.SIGINT])
        seconds[name].append(signalled(folder, MOMENTS[name], number, generator))
        assert_resumable(folder, MOMENTS[name])
    for name, each in seconds.items():
        print(
            f"{name}: {len(each)} signals, median {statistics.median(each):.2f} s, "
            f"longest {max(each):.2f} s"
        )
