"""A signal ends a run at once wherever it is, and the continued run is the same to the last bit."""

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
# Several updates are due at once, and a row is met between two of them.
AGENTS["dqn"] = DQN
AGENTS["ppo"] = (*AGENTS["ppo"], "agent.epochs=3", "agent.minibatches=4")
# Which gradient step is met late in a run; of algorithms that may do few, an earlier one.
LATE = {"dqn": 17, "ppo": 17}

PLACES = {
    "in a gradient step": (steadyrl.agents.learner.learner.Learner, "step"),
    "in an environment's step": (steadyrl.envs.vector.VectorEnv, "receive"),
    "in an evaluation": (steadyrl.training.evaluation.evaluator.Evaluator, "run"),
    "in a report": (steadyrl.training.run.run.Run, "evaluate_and_log"),
    "while a row is counted": (steadyrl.training.run.run.Run, "on_steps"),
    "while it saves": (steadyrl.training.checkpoints.saver.Saver, "save"),
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


def interrupted(folder: Path, chosen: tuple[str, ...], place: str, call: int) -> int:
    """Train until some call of a place is met by SIGTERM; return the exit code."""
    owner, name = PLACES[place]
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
    """Return the places and calls that are met by a signal, one after the other."""
    return [
        ("in a gradient step", 3),
        ("in a report", 1),
        ("in an environment's step", 37),
        ("in a gradient step", LATE.get(name, 9)),
        ("in an evaluation", 1),
        ("while a row is counted", 5),
        ("while it saves", 1),
        ("in a gradient step", 1),
    ]


@pytest.mark.parametrize(("name", "backend"), list(zip(NAMES, cycle(("sync", "async")))))
def test_whatever_a_signal_meets_nothing_is_lost_or_done_twice(
    tmp_path: Path, name: str, backend: str
) -> None:
    chosen = (*AGENTS[name], f"env.backend={backend}")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(job(whole, *RUN, *chosen, quick=False))
    resumed = []
    for place, call in moments(name):
        assert interrupted(parts, chosen, place, call) == 143, place
        told = summary(parts)
        assert told["status"] == "interrupted"
        resumed.append(told["resumed_from_step"])
    assert resumed[0] is None
    assert resumed[1:] == sorted(resumed[1:])
    train(job(parts, *RUN, *chosen, quick=False))
    one, other = summary(whole), summary(parts)
    different = {key for key in one if one[key] != other[key]}
    assert different <= {
        "run_dir", "steps_per_second", "wall_seconds", "rss_mb_peak", "resumed_from_step",
    }  # fmt: skip
    assert metrics(parts / "run") == metrics(whole / "run")


def test_a_burst_of_updates_does_not_hold_a_signal_up(tmp_path: Path) -> None:
    """A million gradient steps are due at once, and a checkpoint says how many were taken."""
    few = ("agent.updates_per_train=1_000_000", "agent.batch_size=1")
    assert interrupted(tmp_path, (*DQN, *few), "in a gradient step", 50) == 143
    [newest, *_] = saved_below(tmp_path / "run" / "checkpoints")
    state = read_part(newest.path, "agent")
    assert state["learner"]["updates"] == state["updates_done"] == 50
    assert interrupted(tmp_path, (*DQN, *few), "in a gradient step", 5) == 143
    [newest, *_] = saved_below(tmp_path / "run" / "checkpoints")
    assert read_part(newest.path, "agent")["updates_done"] == 55


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):  # the signal arrives here
        pass


def stopped_in_a_callback() -> None:
    """Be stopped where Python cannot pass an exception on, as the import system may be."""
    thing = Stop()
    reference = weakref.ref(thing, lambda _: stopped())
    del thing
    assert reference() is None


@pytest.mark.machinery
@pytest.mark.parametrize("happens", [stopped, stopped_in_a_callback])
def test_compiling_is_cut_short_and_what_was_drawn_for_it_is_drawn_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    happens: Callable[[], None],
) -> None:
    def build(self: CompiledGraph, args: Any) -> None:
        happens()
        for _ in range(10**9):  # until it is cut short
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


def test_a_request_comes_through_at_once_only_where_that_is_allowed() -> None:
    stop = Stop()
    with stop.interruptible():
        pass
    stop.request()
    with pytest.raises(Interrupted):
        stop.check()
    with pytest.raises(Interrupted), stop.interruptible():
        raise AssertionError("it was requested before")
    other = Stop()
    with pytest.raises(Interrupted), other.interruptible():
        other.request()


def test_usr1_saves_and_goes_on(tmp_path: Path) -> None:
    asked = []
    original = steadyrl.training.run.run.Run.on_steps

    def on_steps(self: Any, *args: Any) -> None:
        if self.steps == 100 and not asked:
            asked.append(os.kill(os.getpid(), signal.SIGUSR1))
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steadyrl.training.run.run.Run, "on_steps", on_steps)
        train(job(tmp_path, *RUN, *DQN, "eval.every=0", "checkpoint.every=0", quick=False))
    assert [saved.step for saved in saved_below(tmp_path / "run" / "checkpoints")] == [700, 102]
    assert summary(tmp_path)["status"] == "finished"


@pytest.fixture
def alarms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Timers that are noted and never ring."""
    set_: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: set_.append(seconds))
    return set_


def test_a_row_has_a_limited_time_to_end_and_so_has_closing(alarms: list[float]) -> None:
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        signals.begin()
        signal.raise_signal(signal.SIGTERM)
        assert signals.stop.confirmed
        assert alarms == [3.5]
        signal.raise_signal(signal.SIGALRM)
    assert alarms[1:] == [0.8, 0]


def test_a_row_that_ended_is_hurried_no_more(alarms: list[float]) -> None:
    with StopSignals() as signals:
        signals.begin()
        signal.raise_signal(signal.SIGTERM)
        signals.cancel_timeout()
        assert alarms == [3.5, 0]


def test_weights_that_are_no_numbers_are_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled: list[SimpleNamespace] = []
    original = steadyrl.training.run.run.Run.on_steps

    def on_steps(self: Any, *args: Any) -> None:
        original(self, *args)
        if self.steps >= 500 and not spoiled:
            self._services.saver.last_valid()
            spoiled.append(self._agent.weights())
            next(iter(spoiled[-1].values())).fill_(torch.nan)

    monkeypatch.setattr(steadyrl.training.run.run.Run, "on_steps", on_steps)
    logging.getLogger("steadyrl").propagate = True
    never = ("eval.every=0", "log.every=0", "checkpoint.every=100", "agent.learning_starts=2000")
    with pytest.raises(NonFiniteError, match="last good checkpoint is ") as told:
        train(job(tmp_path, *RUN, *DQN, *never, quick=False))
    assert summary(tmp_path)["status"] == "diverged"
    [newest, *_] = saved_below(tmp_path / "run" / "checkpoints")
    assert newest.step < 510
    assert str(newest.path) in str(told.value)
    assert not (tmp_path / "run" / "policy").exists()


def test_a_policy_of_weights_that_are_no_numbers_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = steadyrl.training.evaluation.evaluator.Evaluator.run

    def run(self: Any, agent: Any, *args: Any) -> Any:
        next(iter(agent.weights().values())).fill_(torch.nan)
        return original(self, agent, *args)

    monkeypatch.setattr(steadyrl.training.evaluation.evaluator.Evaluator, "run", run)
    never = ("checkpoint.every=0", "checkpoint.seconds=0", "agent.learning_starts=2000")
    with pytest.raises(NonFiniteError, match="weights at step 300 are not finite"):
        train(job(tmp_path, *RUN, *DQN, *never, quick=False))
    assert not list((tmp_path / "run").glob("*policy*"))
