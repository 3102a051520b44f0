"""Callbacks: called at each event, log, stop, fail as the user's, and resume exactly."""

import errno
import gc
import json
import logging
import math
import os
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from opened import job
from own_callbacks import Faulty, HalfStateful, Idle, Recorder, StopAt, Stopper, Watcher, Wordless

import steadyrl
from steadyrl.core.errors import CommandError, SettingError
from steadyrl.training.callbacks.callback import CallbackError, RunControl
from steadyrl.training.callbacks.runner import Callbacks, find_callbacks
from steadyrl.training.checkpoints.archive import read_part
from steadyrl.training.checkpoints.manifest import CheckpointError, saved_below
from steadyrl.training.checkpoints.plain import from_document, to_document
from steadyrl.training.checkpoints.unsaved import UnsavedError
from steadyrl.training.logging.sinks import JsonLines
from steadyrl.training.run.run import Run

SMALL = (
    "agent=ppo", "agent.hidden=[8]", "agent.rollout_steps=16", "agent.epochs=1", "env.num_envs=2",
    "agent.minibatches=1", "agent.compile=false", "device=cpu", "total_steps=64", "eval.every=32",
    "eval.episodes=2", "log.every=16", "env.backend=sync", "checkpoint.every=32",
)  # fmt: skip


def train(folder, *overrides, callbacks=()):
    given = [*SMALL, f"run_dir={folder / 'run'}", *overrides]
    return steadyrl.train(given, callbacks=callbacks, quiet=True)


def logged(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [
        {k: v for k, v in line.items() if k == "step" or k.startswith(("callback/", "eval/"))}
        for line in lines
    ]


def log_of(result):
    return (result.directory / "train.log").read_text().splitlines()


def last_state(run):
    return read_part(saved_below(run / "checkpoints")[0].path, "run")["callbacks"]


def test_each_event_is_called_with_the_step(tmp_path):
    recorder = Recorder()
    result = train(tmp_path, callbacks=[recorder])
    end = result.summary.steps
    kinds = [event[0] for event in recorder.events]
    assert recorder.events[:2] == [("start", 0), ("checkpoint", 0)]
    assert recorder.events[-1] == ("end", end, "finished")
    evaluations = [event for event in recorder.events if event[0] == "evaluation"]
    assert [step for _, step, _ in evaluations] == [32 + 1, end]
    assert all(episodes == 2 for *_, episodes in evaluations)
    assert kinds.count("checkpoint") >= 3 and kinds.count("start") == kinds.count("end") == 1
    assert end / 2 <= recorder.counts["step"] < end  # a timestep has two environments
    lines = logged(result.directory)
    assert [line["step"] for line in lines if "callback/longest" in line] == [33, end]
    assert lines[-1]["callback/total"] == pytest.approx(recorder.total)
    assert result.summary.stopped_by is None


def test_a_callback_sees_the_run_as_it_is(tmp_path):
    watcher = Watcher()
    result = train(tmp_path, "total_steps=160", callbacks=[watcher])
    begin, *steps, end = watcher.seen
    assert begin[:4] == ("start", 0, None, {}) and begin[4].status == "running"
    for _, step, mean, _, summary in steps:
        assert (summary.steps, summary.return_mean, summary.status) == (step, mean, "running")
    assert [summary.steps for *_, summary in steps] == sorted({step for _, step, *_ in steps})
    assert {mean for _, _, mean, *_ in steps} > {None, result.summary.return_mean}
    assert end[4] is result.summary and end[2] == result.summary.return_mean


def test_metrics_of_a_callbacks_run_are_the_newest_logged(tmp_path):
    watcher = Watcher()
    result = train(tmp_path, callbacks=[watcher])
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").open()]
    for event, step, _, metrics, _ in watcher.seen:
        logged = [line for line in lines if line["step"] < step or event == "end"]
        newest = {tag: value for line in logged for tag, value in line.items()}
        names = newest.keys() - {"step", "wall_seconds"}
        assert {tag: metrics[tag] for tag in names} == {tag: newest[tag] for tag in names}
    numbers = [line["callback/number"] for line in lines if "callback/number" in line]
    assert numbers and max(numbers) < 0  # the last between two lines counts


def test_a_callback_that_keeps_its_run_does_not_keep_the_agent(tmp_path):
    watcher = Watcher()
    result = train(tmp_path, callbacks=[watcher])
    gc.collect()
    assert [each for each in gc.get_objects() if type(each) is Run] == []
    assert watcher.run.summary is result.summary and watcher.run.step == result.summary.steps


@pytest.mark.parametrize("threshold", ["evaluation", "run"])
def test_the_documented_callback_stops_at_a_return(tmp_path, threshold):
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text()
    code = re.search(r"^class StopAtReturn.*?\n\n\n", page, re.M | re.S)[0]
    other = "run.return_mean" if threshold == "evaluation" else "evaluation.mean"
    code = code.replace(f"{other} > 450", f"{other} > 1e9").replace("> 450", "> 5")
    found = {"steadyrl": steadyrl}
    exec(code, found)
    result = train(tmp_path, "total_steps=160", callbacks=[found["StopAtReturn"]()])
    reason = {"evaluation": ": solved", "run": ": training return "}[threshold]
    assert reason in result.summary.stopped_by and result.summary.steps < 160
    assert any("callback/shortest" in line for line in logged(result.directory))


@pytest.mark.parametrize("false", [False, np.False_])
@pytest.mark.parametrize("event", ["on_start", "on_step", "on_evaluation", "on_checkpoint"])
def test_returning_false_stops_the_run(tmp_path, event, false):
    kind = type("False_", (steadyrl.Callback,), {event: lambda *_: false})
    result = train(tmp_path, callbacks=[kind()])
    assert result.summary.status == "finished" and result.summary.steps < 64
    assert result.summary.stopped_by.endswith(f"False_: {event} returned False")


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("_on_step", "on_step(self, run)"),
        ("_on_training_start", "on_start(self, run)"),
        ("on_training_end", "on_end(self, run)"),
        ("_on_rollout_end", "on_step(self, run)"),
        ("_init_callback", "on_start(self, run)"),
        ("on_evalution", "on_evaluation(self, run, evaluation)"),
        ("on_steps", "on_step(self, run)"),
    ],
)
def test_methods_that_are_never_called_are_refused(tmp_path, method, instead):
    kind = type("Foreign", (steadyrl.Callback,), {method: lambda *_: True})
    reason = f"defines {method}, which is never called: write {instead}"
    with pytest.raises(SettingError, match=re.escape(reason)):
        train(tmp_path, callbacks=[kind()])
    assert not (tmp_path / "run").exists()


def test_methods_of_a_callbacks_own_are_allowed(tmp_path):
    own = dict.fromkeys(("on_step", "_on_step", "on_solved", "online"), lambda *_: None)
    kind = type("Helped", (steadyrl.Callback,), own)
    assert train(tmp_path, callbacks=[kind()]).summary.status == "finished"


def test_a_stop_ends_the_run_as_finished(tmp_path):
    run, summary, out = warm.run(tmp_path, *SMALL, "callbacks=[own_callbacks:Stopper]", quick=False)
    assert summary["status"] == "finished" and 20 <= summary["steps"] < 24
    assert summary["stopped_by"] == "own_callbacks:Stopper: far enough"
    assert summary["eval_episodes"] == 2 and (run / "policy").is_dir()
    assert "stopped by own_callbacks:Stopper: far enough" in out
    assert steadyrl.load(run).metadata["step"] == summary["steps"]


def test_a_stopped_run_can_be_resumed(tmp_path):
    first = train(tmp_path, callbacks=[Wordless()])
    assert first.summary.stopped_by == "own_callbacks:Wordless" and first.summary.steps < 64
    again = steadyrl.train([f"resume={first.directory}"], quiet=True)
    assert again.summary.steps >= 64 and again.summary.stopped_by is None


def test_a_run_that_its_last_checkpoint_stops_too_can_be_resumed(tmp_path):
    kind = type("Stops", (steadyrl.Callback,), {"on_checkpoint": lambda *_: False})
    first = train(tmp_path, callbacks=[kind()])
    assert first.summary.stopped_by.endswith("on_checkpoint returned False")
    assert first.summary.steps < 64
    again = steadyrl.train([f"resume={first.directory}"], quiet=True)
    assert again.summary.steps >= 64 and again.summary.stopped_by is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "chosen"),
    [
        ("stopped", ()),
        ("stopped", ("agent.noisy.enabled=true",)),
        ("stopped", ("env.backend=kernel", "agent.train_every=6")),
        ("extended", ("agent.n_step=1",)),
        ("extended", ("env.backend=kernel",)),
    ],
)
def test_a_run_that_is_continued_learns_what_an_uninterrupted_one_does(tmp_path, how, chosen):
    """Its last evaluation does updates that otherwise come after the next decision."""
    settings = (
        "agent=dqn", "env=cartpole", "env.num_envs=3", "env.backend=sync", "total_steps=400",
        "agent.hidden=[16]", "agent.compile=false", "device=cpu", "agent.learning_starts=100",
        "agent.train_every=1", "agent.anneal_learning_rate=constant", "agent.learning_rate=0.1",
        "agent.replay.beta_end=0.4",
        "agent.epsilon_start=0.1", "agent.epsilon_end=0.1", "eval.every=0", "log.every=0", *chosen,
    )  # fmt: skip
    whole = steadyrl.train([*settings, f"run_dir={tmp_path / 'whole'}"], quiet=True).summary
    assert whole.updates > 40
    parts = ["total_steps=400"]
    if how == "extended":
        parts = [*(f"total_steps={steps}" for steps in (201, 233)), *parts]
    given = [*settings, f"run_dir={tmp_path / 'parts'}"]
    stops = [StopAt(step) for step in (150, 233)]
    for part in parts:
        for stop in stops if how == "stopped" else ():
            steadyrl.train([*given, part, "resume=auto"], callbacks=[stop], quiet=True)
        continued = steadyrl.train([*given, part, "resume=auto"], quiet=True).summary
    assert (continued.steps, continued.updates) == (whole.steps, whole.updates)
    assert continued.weights_sha256 == whole.weights_sha256


@pytest.mark.parametrize(
    "where", ["on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end", "state_dict"]
)
def test_what_it_raises_ends_the_run_as_the_users_fault(tmp_path, monkeypatch, where):
    monkeypatch.setenv("FAILS_IN", where)
    text = rf"callback own_callbacks:Faulty failed in {where} at step .*KeyError.*own_callbacks\.py"
    with pytest.raises(CallbackError, match=text) as caught:
        train(tmp_path, callbacks=[Faulty()])
    assert caught.value.exit_code == 4
    assert "train.log" in str(caught.value)
    assert "FAILS HERE" in (tmp_path / "run" / "train.log").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_the_number_of_threads_that_it_sets_is_not_that_of_training(tmp_path):
    seen = []

    class Greedy(steadyrl.Callback):
        def on_start(self, run):
            torch.set_num_threads(2)

        def on_step(self, run):
            seen.append(torch.get_num_threads())

    train(tmp_path, "threads=1", callbacks=[Greedy()])
    assert set(seen) == {1}


@pytest.mark.parametrize("value", [[1.0, 2.0], "high", None, torch.ones(2), 10**400])
def test_what_is_no_number_is_named_with_its_metric(value):
    control = RunControl(Path(), 10, lambda: None)
    with pytest.raises(TypeError, match=r"run\.log\('curriculum', …\): .* is not one number$"):
        control.log("curriculum", value)
    control.log("curriculum", torch.ones(1))
    assert control.pending == {"callback/curriculum": 1.0}


def test_the_commands_exit_code_is_4(tmp_path, monkeypatch):
    process = warm.start(tmp_path, *SMALL, "callbacks=[own_callbacks:Unplain]", quick=False)
    _, err = process.communicate()
    assert process.wait() == 4
    assert "own_callbacks:Unplain failed in state_dict at step 0" in err
    assert "object cannot be saved" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({3: 1}, "3 cannot be a key of saved state"),
        ({"log": [0.0] * 1_100_000}, "values, 1,000,000 are allowed"),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_ends_the_run_at_once(tmp_path, state, reason):
    class Large(steadyrl.Callback):
        def state_dict(self):
            return state

    with pytest.raises(CallbackError, match=rf"failed in state_dict at step 0: .*{reason}"):
        train(tmp_path, callbacks=[Large()])


class Ends(steadyrl.Callback):
    """Stops the run; sees its end in its summary, and that on the disk."""

    def on_step(self, run):
        run.stop("far enough")

    def on_end(self, run):
        self.status = run.summary.status
        self.saved = json.loads((run.directory / "summary.json").read_text())


@pytest.mark.parametrize("lost", [False, True])
def test_the_end_is_settled_before_on_end(tmp_path, monkeypatch, lost):
    """Else a process that dies in on_end leaves a run that goes on though it was stopped."""
    ends = Ends()
    if lost:
        original = JsonLines.write

        def write(self, record):
            if record.step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(self, record)

        monkeypatch.setattr(JsonLines, "write", write)
    with pytest.raises(UnsavedError) if lost else nullcontext():
        train(tmp_path, callbacks=[ends])
    assert ends.status == ends.saved["status"] == ("failed" if lost else "finished")
    assert ends.saved["stopped_by"].endswith("Ends: far enough")


def test_on_end_fails_only_where_nothing_else_did(tmp_path, monkeypatch, caplog):
    class Both(Faulty):
        def on_step(self, run):
            raise ValueError("the first error")

    monkeypatch.setenv("FAILS_IN", "on_end")
    with pytest.raises(CallbackError, match="the first error"):
        train(tmp_path, callbacks=[Both()])
    assert "failed in on_end" in (tmp_path / "run" / "train.log").read_text()


def test_a_resumed_run_has_the_state_of_an_uninterrupted_one(tmp_path, monkeypatch):
    named = "callbacks=[own_callbacks:Recorder]"
    whole = train(tmp_path / "whole", callbacks=[Recorder()]).directory
    folder = tmp_path / "cut"
    folder.mkdir()
    process = warm.Process(
        folder, [*SMALL, named, f"run_dir={folder / 'run'}"], {"STOP_AT_40": "1"}
    )
    process.communicate()
    assert process.wait() == 128 + 15
    with pytest.raises(CheckpointError, match=r"imports a module.*callbacks=\[\] leaves"):
        steadyrl.train([f"resume={folder / 'run'}"])
    result = steadyrl.train([f"resume={folder / 'run'}", named], quiet=True)
    assert result.summary.resumed_from_step in range(40, 44)
    assert last_state(result.directory) == last_state(whole)
    assert logged(result.directory) == logged(whole)


def test_all_modules_that_a_checkpoint_names_are_refused_at_once(tmp_path):
    named = ["env.id=toy_environments:Counter-v0", "callbacks=[own_callbacks:Recorder]"]
    run = train(tmp_path, *named).directory
    again = [f"resume={run}", "total_steps=96"]
    for typed, missing in (
        ([], named), (named[:1], named[1:]), (named[1:], named[:1]), (["callbacks=[]"], named[:1]),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="which a saved file cannot ask for") as caught:
            steadyrl.train([*again, *typed])
        (line,) = caught.value.details
        command = shlex.split(line)
        assert set(command) >= {*again, *typed, *missing}
        assert set(caught.value.overrides) == set(missing)
        assert ("callbacks=[] leaves" in str(caught.value)) == (named[1] in missing)
    assert steadyrl.train([*again, *named], quiet=True).summary.steps >= 96


def test_numbers_that_are_not_finite_are_no_obstacle_to_resume(tmp_path):
    def controlled():
        control = RunControl(tmp_path, 100, lambda: None)
        return Callbacks([Idle()], control), control

    first, control = controlled()
    control.log("rate", math.nan)  # such as 0 wins of 0 games
    control.log("worst", -math.inf)
    control.log("best", 2)
    text, tensors = to_document(first.state_dict())
    second, control = controlled()
    second.load_state_dict(from_document(text, tensors))
    assert repr(second.complete({})) == repr(first.complete({}))


@pytest.mark.parametrize("named", [True, False])  # in the command, or given as objects
def test_a_resumed_run_goes_on_without_the_callbacks_that_it_lacks(tmp_path, named):
    """Also without their saved state, which the checkpoint has under another name."""
    names = ["callbacks=[own_callbacks:Recorder,own_callbacks:Idle]"] if named else []
    first = train(tmp_path, *names, callbacks=() if named else [Recorder(), Idle()])
    resume = [f"resume={first.directory}", "total_steps=96", *(["callbacks=[]"] if named else [])]
    again = steadyrl.train(resume, quiet=True)
    assert again.summary.status == "finished" and again.summary.resumed_from_step > 0
    lacking = "the run goes on without own_callbacks:Recorder, own_callbacks:Idle"
    (warning,) = [line for line in log_of(again) if "WARNING callbacks: " in line]
    assert lacking in warning and "(given: none)" in warning
    assert last_state(again.directory)["states"] == {}


def test_a_resumed_run_takes_the_state_of_those_that_it_has(tmp_path):
    class Renamed(Recorder):
        """A class of another name."""

    first = train(tmp_path, callbacks=[Recorder(), Renamed()])
    recorder, other = Recorder(), Renamed()
    other.__class__ = type("Other", (Recorder,), {})
    resume = [f"resume={first.directory}", "total_steps=96"]
    again = steadyrl.train(resume, callbacks=[recorder, other], quiet=True)
    assert recorder.counts["step"] > other.counts["step"] > 0
    (warning,) = [line for line in log_of(again) if "WARNING callbacks: " in line]
    assert "without tests.test_callbacks:" in warning and "Renamed and what" in warning
    assert "given: own_callbacks:Recorder, tests.test_callbacks:Other" in warning


def test_a_callback_without_load_state_dict_begins_anew(tmp_path):
    first = train(tmp_path, callbacks=[HalfStateful()])
    resume = [f"resume={first.directory}", "total_steps=96"]
    again = steadyrl.train(resume, callbacks=[HalfStateful()], quiet=True)
    (warning,) = [line for line in log_of(again) if "WARNING callbacks: " in line]
    assert "own_callbacks:HalfStateful has no load_state_dict: it begins anew" in warning


def test_callbacks_of_one_class_have_states_of_their_own(tmp_path):
    first, second = Recorder(), Recorder()
    second.total = 100.0
    train(tmp_path, callbacks=[first, second])
    states = last_state(tmp_path / "run")["states"]
    assert list(states) == ["own_callbacks:Recorder", "own_callbacks:Recorder#2"]
    assert states["own_callbacks:Recorder#2"]["total"] == pytest.approx(second.total)
    assert second.total == pytest.approx(first.total + 100)


@pytest.mark.machinery
def test_fused_rollouts_call_it_once_a_block(tmp_path):
    recorder = Recorder()
    overrides = ("env.backend=kernel", "total_steps=2000", "agent.rollout_steps=128")
    result = train(
        tmp_path, *overrides, "log.every=500", "eval.every=0", "checkpoint.every=0",
        callbacks=[recorder],
    )  # fmt: skip
    assert recorder.counts["step"] < result.summary.steps / 4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own_callbacks:Recrder", "has no Recrder; did you mean Recorder"),
        ("own_callbacks:other", "is a object, no steadyrl.Callback"),
        ("own_callbacks:NeedsArguments", "cannot be built: TypeError"),
        ("no_such_module:Name", "No module named 'no_such_module'"),
        ("Recorder", "must be module:name"),
    ],
)
def test_wrong_names_are_refused(tmp_path, name, reason):
    with pytest.raises(SettingError, match=reason):
        train(tmp_path, f"callbacks=[{name}]")
    assert not (tmp_path / "run").exists()


def test_other_objects_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"no steadyrl\.Callback"):
        train(tmp_path, callbacks=[print])
    with pytest.raises(SettingError, match=r"Stopper: is a class, no object: write Stopper\(\)"):
        train(tmp_path, callbacks=[Stopper])
    with pytest.raises(SettingError, match=r"must be a list: callbacks=\[Stopper\(\)\]"):
        train(tmp_path, callbacks=Stopper())
    with pytest.raises(SettingError, match=r'"callbacks=\[own_callbacks:Stopper\]"'):
        train(tmp_path, callbacks=["own_callbacks:Stopper"])
    for wrong in ("own_callbacks:Stopper", Stopper, None):
        with pytest.raises(SettingError, match="must be a list of objects"):
            train(tmp_path, callbacks=wrong)


def test_several_ranks_are_refused(tmp_path, monkeypatch):
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match="cannot be combined with torchrun"):
        job(tmp_path, "callbacks=[own_callbacks:Stopper]")
    with pytest.raises(CommandError, match="trains in one process"):
        train(tmp_path)


def test_runs_of_one_process_have_objects_of_their_own():
    names = ["own_callbacks:instance"]
    (one,), (other,) = find_callbacks(names), find_callbacks(names)
    assert one is not other and type(one) is type(other)


def test_an_object_of_a_module_is_used(tmp_path):
    result = train(tmp_path, "callbacks=[own_callbacks:instance]")
    assert result.summary.stopped_by == "own_callbacks:Stopper: far enough"
    assert logging.getLogger("steadyrl").handlers == []
