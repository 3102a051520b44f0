"""Signals interrupt a run anywhere; the resumed run equals an uninterrupted one bitwise."""

from __future__ import annotations

import json
import logging
import os
import signal
import weakref
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithms import NAMES, eager, small
from opened import job

import steadyrl.agents.learner.learner
import steadyrl.envs.vector
import steadyrl.training.checkpoints.saver
import steadyrl.training.evaluation.evaluator
import steadyrl.training.run.run
from steadyrl.agents.engine.inductor import CompiledGraph
from steadyrl.agents.learner.interrupt import Interrupted, Stop
from steadyrl.core.errors import NonFiniteError
from steadyrl.loop import train
from steadyrl.training.checkpoints.archive import read_part
from steadyrl.training.checkpoints.manifest import saved_below
from steadyrl.training.run.signals import StopSignals

RUN = ("eval.every=300", "eval.episodes=2", "log.every=100", "env.num_envs=2", "total_steps=700",
       "checkpoint.every=150", "memory.monitor.tensors_every_seconds=1000", "env=cartpole",
       "threads=1", "device=cpu", "resume=auto")  # fmt: skip
DQN = (*eager("dqn"), "agent.hidden=[8]", "agent.epsilon_fraction=0.16", "agent.epsilon_end=0.04",
       "agent.learning_starts=100", "agent.train_every=8", "agent.replay.capacity=300",
       "agent.updates_per_train=5", "agent.replay.prioritized=true", "agent.n_step=3",
       "agent.batch_size=8")  # fmt: skip
AGENTS = {name: (*eager(name), *small(name).short, *small(name).stateful) for name in NAMES}
# Several updates are due at once, so signals arrive between two of them.
AGENTS["dqn"] = DQN
AGENTS["ppo"] = (*AGENTS["ppo"], "agent.epochs=3", "agent.minibatches=4")
# Gradient step that is interrupted late in a run; earlier for algorithms with few steps.
LATE = {"dqn": 17, "ppo": 17}

FUNCTIONS = {
    "in a gradient step": (steadyrl.agents.learner.learner.Learner, "step"),
    "in an environment's step": (steadyrl.envs.vector.VectorEnv, "receive"),
    "in an evaluation": (steadyrl.training.evaluation.evaluator.Evaluator, "run"),
    "while logging": (steadyrl.training.run.run.Run, "evaluate_and_log"),
    "while counting a timestep": (steadyrl.training.run.run.Run, "on_steps"),
    "while saving": (steadyrl.training.checkpoints.saver.Saver, "save"),
}


def metrics(directory: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    times = ("time/", "memory/", "wall_seconds")
    return [
        {k: v for k, v in line.items() if k == "memory/replay_fill" or not k.startswith(times)}
        for line in lines
    ]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "summary.json").read_text())


def interrupted(folder: Path, chosen: tuple[str, ...], where: str, call: int) -> int:
    """Train until SIGTERM at the given call of a function; return the exit code."""
    owner, name = FUNCTIONS[where]
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        return train(job(folder, *RUN, *chosen, quick=False)).exit_code


def moments(name: str) -> list[tuple[str, int]]:
    """Return the (function, call) pairs at which signals are sent, in order."""
    return [
        ("in a gradient step", 3),
        ("while logging", 1),
        ("in an environment's step", 37),
        ("in a gradient step", LATE.get(name, 9)),
        ("in an evaluation", 1),
        ("while counting a timestep", 5),
        ("while saving", 1),
        ("in a gradient step", 1),
    ]


@pytest.mark.long
@pytest.mark.parametrize(("name", "backend"), list(zip(NAMES, cycle(("sync", "async")))))
def test_signals_anywhere_lose_or_repeat_nothing(tmp_path: Path, name: str, backend: str) -> None:
    chosen = (*AGENTS[name], f"env.backend={backend}")
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    train(job(uninterrupted, *RUN, *chosen, quick=False))
    resumed = []
    for where, call in moments(name):
        assert interrupted(parts, chosen, where, call) == 143, where
        found = summary(parts)
        assert found["status"] == "interrupted"
        resumed.append(found["resumed_from_step"])
    assert resumed[0] is None
    assert resumed[1:] == sorted(resumed[1:])
    train(job(parts, *RUN, *chosen, quick=False))
    one, other = summary(uninterrupted), summary(parts)
    times = ("time_share_", "speed_trend_")
    different = {key for key in one if one[key] != other[key] and not key.startswith(times)}
    assert different <= {
        "run_dir", "steps_per_second", "wall_seconds", "rss_mb_peak", "tree_mb_peak",
        "resumed_from_step", "cleanings", "cleaned_mb",
    }  # fmt: skip
    assert metrics(parts / "run") == metrics(uninterrupted / "run")


def test_a_signal_interrupts_a_burst_of_updates(tmp_path: Path) -> None:
    """A million gradient steps are due; the checkpoint holds the number taken."""
    options = ("agent.updates_per_train=1_000_000", "agent.batch_size=1")
    options = (*options, "agent.learning_starts=560")  # the actor has drawn a second block by then
    assert interrupted(tmp_path, (*DQN, *options), "in a gradient step", 50) == 143
    [newest, *_] = saved_below(tmp_path / "run" / "checkpoints")
    state = read_part(newest.path, "agent")
    assert state["learner"]["updates"] == state["updates_done"] == 50
    assert interrupted(tmp_path, (*DQN, *options), "in a gradient step", 5) == 143
    [newest, *_] = saved_below(tmp_path / "run" / "checkpoints")
    later = read_part(newest.path, "agent")
    assert later["updates_done"] == 55
    assert later["actor"] == state["actor"]  # it has not acted in between


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):  # until the signal is handled
        pass


def send_sigterm_in_a_callback() -> None:
    """Get the signal where Python cannot propagate exceptions, as in some import hooks."""
    thing = Stop()
    reference = weakref.ref(thing, lambda _: send_sigterm())
    del thing
    assert reference() is None


@pytest.mark.machinery
@pytest.mark.parametrize("interrupt", [send_sigterm, send_sigterm_in_a_callback])
def test_interrupted_compilation_restores_the_generators(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    interrupt: Callable[[], None],
) -> None:
    def build(self: CompiledGraph, args: Any) -> None:
        interrupt()
        for _ in range(10**9):  # until interrupted
            pass
        raise AssertionError

    chosen = (*DQN, "agent.compile=true")
    with monkeypatch.context() as patch:
        patch.setattr(CompiledGraph, "build", build)
        assert train(job(tmp_path / "parts", *RUN, *chosen, quick=False)).exit_code == 143
    assert "Traceback" not in capfd.readouterr().err

    def eager(self: CompiledGraph, args: Any) -> None:
        self._failed = True

    monkeypatch.setattr(CompiledGraph, "build", eager)
    for folder in ("parts", "whole"):
        train(job(tmp_path / folder, *RUN, *chosen, quick=False))
    one, other = summary(tmp_path / "whole"), summary(tmp_path / "parts")
    assert one["weights_sha256"] == other["weights_sha256"]
    assert other["resumed_from_step"] > 0


def test_stop_requests_raise_only_when_interruptible() -> None:
    stop = Stop()
    with stop.interruptible():
        pass
    stop.request()
    with pytest.raises(Interrupted):
        stop.check()
    with pytest.raises(Interrupted), stop.interruptible():
        raise AssertionError("stop was requested before")
    other = Stop()
    with pytest.raises(Interrupted), other.interruptible():
        other.request()


def test_sigusr1_saves_and_continues(tmp_path: Path) -> None:
    sent = []
    original = steadyrl.training.run.run.Run.on_steps

    def on_steps(self: Any, *args: Any) -> None:
        if self.steps == 100 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGUSR1))
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steadyrl.training.run.run.Run, "on_steps", on_steps)
        train(job(tmp_path, *RUN, *DQN, "eval.every=0", "checkpoint.every=0", quick=False))
    assert [saved.step for saved in saved_below(tmp_path / "run" / "checkpoints")] == [700, 102]
    assert summary(tmp_path)["status"] == "finished"


@pytest.fixture
def alarms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record timers without starting them; return their seconds."""
    set_: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: set_.append(seconds))
    return set_


def test_the_current_step_and_closing_have_time_limits(alarms: list[float]) -> None:
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        signals.begin()
        signal.raise_signal(signal.SIGTERM)
        assert signals.stop.confirmed
        assert alarms == [3.5]
        signal.raise_signal(signal.SIGALRM)
    assert alarms[1:] == [0.8, 0]


def test_a_finished_step_cancels_its_timeout(alarms: list[float]) -> None:
    with StopSignals() as signals:
        signals.begin()
        signal.raise_signal(signal.SIGTERM)
        signals.cancel_timeout()
        assert alarms == [3.5, 0]


def test_non_finite_weights_are_never_saved_in_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned: list[SimpleNamespace] = []
    original = steadyrl.training.run.run.Run.on_steps

    def on_steps(self: Any, *args: Any) -> None:
        original(self, *args)
        if self.steps >= 500 and not poisoned:
            self._services.saver.last_valid()
            poisoned.append(self._agent.weights())
            next(iter(poisoned[-1].values())).fill_(torch.nan)

    monkeypatch.setattr(steadyrl.training.run.run.Run, "on_steps", on_steps)
    logging.getLogger("steadyrl").propagate = True
    quiet = ("eval.every=0", "log.every=0", "checkpoint.every=100", "agent.learning_starts=2000")
    with pytest.raises(NonFiniteError, match="last good checkpoint is ") as raised:
        train(job(tmp_path, *RUN, *DQN, *quiet, quick=False))
    assert summary(tmp_path)["status"] == "diverged"
    [newest, *_] = saved_below(tmp_path / "run" / "checkpoints")
    assert newest.step < 510
    assert str(newest.path) in str(raised.value)
    assert not (tmp_path / "run" / "policy").exists()


def test_non_finite_weights_are_never_saved_in_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = steadyrl.training.evaluation.evaluator.Evaluator.run

    def run(self: Any, agent: Any, *args: Any) -> Any:
        next(iter(agent.weights().values())).fill_(torch.nan)
        return original(self, agent, *args)

    monkeypatch.setattr(steadyrl.training.evaluation.evaluator.Evaluator, "run", run)
    quiet = ("checkpoint.every=0", "checkpoint.seconds=0", "agent.learning_starts=2000")
    with pytest.raises(NonFiniteError, match="weights at step 300 are not finite"):
        train(job(tmp_path, *RUN, *DQN, *quiet, quick=False))
    assert not list((tmp_path / "run").glob("*policy*"))
