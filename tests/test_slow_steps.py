"""After a signal, slow steps are waited for; hanging ones are not."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import warm
from command import QUICK
from opened import job

from steadyrl.agents.learner.learner import Learner
from steadyrl.envs.step_clock import StepClock
from steadyrl.loop import train
from steadyrl.training.callbacks.callback import Callback, RunControl
from steadyrl.training.checkpoints.run_directory import resume_override
from steadyrl.training.run import signals
from steadyrl.training.run.signals import RANKS_SECONDS, STEP_SECONDS, Patience, StopSignals
from steadyrl.training.run.watcher import Watcher
from steadyrl.training.run.watcher_process import (
    ALLOWED,
    BEGUN,
    SLACK,
    STEP,
    TOGETHER,
    WORDS,
    Stuck,
)

SLOW = ("env.id=slow_env:Slow-v0", "env.backend=sync", "env.kwargs.file=steps", "eval.every=0",
        "total_steps=1e6", "run_dir=run")  # fmt: skip


def timeout_of(chosen: Any = "auto", *, envs: int = 1, slowest: float = 0.0, running: float = 0.0):
    """Return the time limit of the current step, with step_timeout=60.

    Without `envs` the slow part is a callback, an update or a video.
    """
    run = SimpleNamespace(stop_timeout=chosen, env=SimpleNamespace(step_timeout=60.0))
    clock = SimpleNamespace(slowest=slowest, running=running)
    idle = SimpleNamespace(slowest=0.0, running=0.0)
    part, clock = (clock, idle) if envs == 0 else (idle, clock)
    env = SimpleNamespace(clock=clock, spec=SimpleNamespace(num_envs=envs))
    patience = Patience(run, [env])  # type: ignore[arg-type, list-item]
    patience.parts = [part]
    return patience.seconds()


def test_the_time_limit_depends_on_the_slowest_and_running_step() -> None:
    assert timeout_of() == timeout_of(slowest=0.01, running=0.005) == STEP_SECONDS
    assert timeout_of(slowest=10.0) == 20.0
    assert timeout_of(slowest=50.0) == 60.0  # at most the timeout of one environment
    assert timeout_of(slowest=50.0, envs=64) == 100.0
    assert timeout_of(running=25.0) == 25.0  # the first step
    assert timeout_of(slowest=1.0, running=3600.0) == STEP_SECONDS  # hanging
    assert timeout_of(0.5, slowest=10.0) == 0.5
    assert timeout_of(envs=0, slowest=50.0) == 100.0
    assert timeout_of(envs=0, running=25.0) == 25.0
    assert timeout_of(envs=0, running=3600.0) == STEP_SECONDS


def test_the_step_clock_measures_slowest_and_running_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock, slower, seen = StepClock(), [], memoryview(bytearray(8)).cast("Q")
    clock.on_slower = lambda: slower.append(clock.slowest)
    clock.show_in(seen)
    numbers = []
    for seconds in (2.0, 1.0, 5.0):
        assert (clock.running, seen[0]) == (0.0, 0)
        with clock:
            numbers.append(seen[0])
            now[0] += seconds
            assert clock.running == seconds
    clock.begin()  # workers step while the trainer updates
    now[0] += 7.0
    with clock:
        now[0] += 1.0
    assert slower == [2.0, 5.0, 8.0] and numbers == [1, 2, 3]
    clock.begin()  # compiling the update took longer than the step
    now[0] += 90.0
    with clock:
        now[0] += 0.001
    assert clock.slowest == 8.0 and clock.running == 0.0


@pytest.mark.parametrize("multi_rank", [False, True])
def test_the_stop_timer_uses_the_limit_and_waits_for_saves(
    monkeypatch: pytest.MonkeyPatch, multi_rank: bool
) -> None:
    timers: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: timers.append(seconds))
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        signals.stop.multi_rank = multi_rank
        signals.patience = lambda: 12.0
        limits: list[float] = []
        signals.on_limit = limits.append
        signals.begin()
        signals.saving = True
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGALRM)
        signals.saving = False
        signal.raise_signal(signal.SIGALRM)
    assert timers[:2] == limits == [RANKS_SECONDS if multi_rank else 12.0] * 2
    assert timers[2] < 1.0


def numbers(**changes: int) -> memoryview:
    words = memoryview(bytearray(8 * WORDS)).cast("Q")
    for name, value in {"BEGUN": 1, "ALLOWED": 3000, **changes}.items():
        words[{"STEP": STEP, "ALLOWED": ALLOWED, "TOGETHER": TOGETHER, "BEGUN": BEGUN}[name]] = (
            value
        )
    return words


def test_only_the_step_at_the_signal_counts_as_stuck() -> None:
    words = numbers(STEP=7)
    stuck = Stuck(words)
    stuck.signalled(signal.SIGTERM, 100.0)
    assert stuck.deadline == 103.0 + SLACK
    words[STEP] = 0  # saving or updating, not stepping
    assert not stuck.confirmed(105.0)
    words[STEP] = 8
    assert not stuck.confirmed(110.0)
    assert stuck.confirmed(115.0)


def test_a_step_that_the_run_gives_longer_is_not_killed() -> None:
    words = numbers(STEP=7)
    stuck = Stuck(words)
    stuck.signalled(signal.SIGTERM, 100.0)
    words[ALLOWED] = 15_000  # by the handler: the step has taken 15 seconds already
    assert not stuck.confirmed(105.0)
    assert stuck.deadline == 115.0 + SLACK
    assert stuck.confirmed(117.0)


def test_before_a_run_starts_anything_hanging_is_stuck() -> None:
    words = numbers(BEGUN=0)
    stuck = Stuck(words)
    stuck.signalled(signal.SIGTERM, 100.0)
    assert stuck.confirmed(105.0)
    words[BEGUN] = 1
    assert not stuck.confirmed(105.0)


@pytest.mark.parametrize(("multi_rank", "deadline"), [(0, 102.0 + 3.0), (1, 160.0 + SLACK)])
def test_a_second_signal_shortens_the_deadline_except_with_ranks(
    multi_rank: int, deadline: float
) -> None:
    stuck = Stuck(numbers(STEP=7, ALLOWED=60_000, TOGETHER=multi_rank))
    stuck.signalled(signal.SIGTERM, 100.0)
    stuck.signalled(signal.SIGTERM, 102.0)
    assert stuck.deadline == deadline


def test_a_signal_that_comes_twice_does_not_shorten_the_deadline() -> None:
    stuck = Stuck(numbers(STEP=7, ALLOWED=60_000))
    for seconds in (100.0, 100.1, 100.9):
        stuck.signalled(signal.SIGTERM, seconds)
    assert stuck.deadline == 160.0 + SLACK
    stuck.signalled(signal.SIGINT, 100.95)
    assert stuck.deadline == 100.95 + 3.0


def test_the_watcher_ends_with_the_run_without_leaks() -> None:
    before = psutil.Process().num_fds()
    with Watcher(1.0, together=False) as watcher:
        if watcher._process is None:
            pytest.skip("no process can watch here")
        child = psutil.Process(watcher._process.pid)
        assert child.is_running()
        assert not {"torch", "numpy"} & set("".join(child.cmdline()))
    assert not child.is_running()
    del watcher
    gc.collect()
    assert psutil.Process().num_fds() == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts a run, which is killed if the test fails."""
    started: list[warm.Process] = []

    def start(*overrides: str) -> warm.Process:
        started.append(warm.Process(tmp_path, [*QUICK, *SLOW, *overrides]))
        return started[0]

    yield start
    for process in started:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)


class SlowCallback(Callback):
    """Is slow at every step; SIGTERM comes in its second one."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, run: RunControl) -> None:
        self.steps += 1
        if self.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0 if self.steps == 1 else 0.3)


def saved_after_a_signal(folder: Path, monkeypatch: pytest.MonkeyPatch, *chosen: Any) -> bool:
    """Train with next to no patience for fast steps; return whether the last step was saved."""
    overrides = [each for each in chosen if isinstance(each, str)]
    callbacks = tuple(each for each in chosen if isinstance(each, Callback))
    monkeypatch.setattr(signals, "STEP_SECONDS", 0.02)
    given = job(folder, "total_steps=1e6", "eval.every=0", "env.num_envs=1", *overrides)
    try:
        result = train(given._replace(callbacks=callbacks))
    except signals.StoppedError:
        return False
    last = f"step-{result.summary.steps:012d}"
    return result.exit_code == 143 and (folder / "run" / "checkpoints" / last).is_dir()


@pytest.mark.long
def test_a_callback_that_is_always_slow_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved_after_a_signal(tmp_path, monkeypatch, SlowCallback())


@pytest.mark.long
def test_a_gradient_step_that_is_always_slow_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Learner.step, 0

    def step(self: Learner, *inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:  # of the third update; the first may compile
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep({3: 1.0, 5: 0.3}.get(calls, 0.0))
        return original(self, *inputs)

    monkeypatch.setattr(Learner, "step", step)
    assert saved_after_a_signal(tmp_path, monkeypatch, "agent.learning_starts=20")


def wait_for_steps(folder: Path, process: Any, steps: int) -> None:
    """Wait until so many slow steps have started."""
    step_file = folder / "steps"
    while not step_file.exists() or len(step_file.read_text().split()) < steps:
        assert not process.is_over(0.02), process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("stuck", ["false", "true"])
def test_a_slow_step_is_finished_and_saved(tmp_path: Path, run: Any, stuck: str) -> None:
    process = run("env.kwargs.seconds=6", f"env.kwargs.stuck={stuck}")
    wait_for_steps(tmp_path, process, 2)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 143, out + err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", 2)
    assert (tmp_path / "run" / "checkpoints" / "step-000000000002").is_dir()


def test_a_configured_stop_timeout_is_used(tmp_path: Path, run: Any) -> None:
    process = run("env.kwargs.seconds=1000", "env.kwargs.after=50", "stop_timeout=0.2")
    wait_for_steps(tmp_path, process, 1)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 143, out + err
    place = re.search(r"the current step \((.+)\) did not finish in time: stopping without", err)
    assert place and re.fullmatch(r".*slow_env\.py:\d+", place[1]), err
    assert re.search(r"^lost: (all )?\d+ steps?\b", out, re.M), out


@pytest.mark.long
@pytest.mark.parametrize("name", ["run", "rün (1)"])
def test_a_step_hanging_in_native_code_is_killed(tmp_path: Path, run: Any, name: str) -> None:
    process = run(
        "env.kwargs.seconds=1000", "env.kwargs.after=50", "env.kwargs.stuck=true",
        "stop_timeout=0.2", f'run_dir="{name}"',
    )  # fmt: skip
    wait_for_steps(tmp_path, process, 1)
    [watcher] = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, out + err
    line = "the current step does not return from native code: killed; the last checkpoint stays: "
    assert f"\n{line}{resume_override(tmp_path / name)} goes on from it\n" in err
    psutil.wait_procs([watcher])


@pytest.mark.long
def test_signals_to_forked_children_do_not_stop_the_run(tmp_path: Path, run: Any) -> None:
    process = run(
        "env.kwargs.seconds=4", "env.kwargs.stuck=true", "env.kwargs.forks=true",
        "stop_timeout=0.1", "total_steps=1", "agent.learning_starts=1000",
    )  # fmt: skip
    out, err = process.communicate()
    assert process.returncode == 0, out + err


def test_the_watcher_ends_with_a_killed_run(tmp_path: Path, run: Any) -> None:
    process = run("env.kwargs.seconds=1000")
    wait_for_steps(tmp_path, process, 1)
    watchers = psutil.Process(process.pid).children()
    assert watchers
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    gone, alive = psutil.wait_procs(watchers, timeout=60)
    assert gone and not alive
