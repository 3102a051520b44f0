"""`resume=RUN/checkpoints/step-…`: in the run, with what came after set aside, or elsewhere."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from opened import job
from unhurried import unhurried_saves
from warm import run

import steadyrl
from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import SettingError, error_lines
from steadyrl.loop import train
from steadyrl.training.analysis.past_runs import find_runs
from steadyrl.training.checkpoints.manifest import CheckpointError, manifest_metadata
from steadyrl.training.checkpoints.run_directory import read_summary
from steadyrl.training.cli.evaluate import main as evaluate
from steadyrl.training.config.overrides import escape_colons
from steadyrl.training.run.run import Run
from tests.test_resume import fingerprint, metrics, names

SAVING = ("checkpoint.every=200", "checkpoint.keep=9", "eval.every=200")
EARLIER = "run/checkpoints/step-000000000200"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that has saved at every step where it should."""
    folder = tmp_path_factory.mktemp("finished")
    with unhurried_saves():
        train(job(folder, "total_steps=600", *SAVING, "log.every=100"))
    return folder


@pytest.fixture
def copy_(finished: Path, tmp_path: Path) -> Path:
    """Return a folder with a copy of the finished run."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path


def results(directory: Path) -> dict[str, Any]:
    """Return what does not depend on how often, where and how fast a run was trained."""
    summary = read_summary(directory)
    kept = ("status", "steps", "updates", "episodes", "weights_sha256")
    return {key: summary[key] for key in (*kept, "best_eval_return_mean")}


def test_an_earlier_checkpoint_is_continued_in_its_run(finished: Path, copy_: Path) -> None:
    directory, summary, printed = run(copy_, f"resume={EARLIER}", quick=False)
    aside = directory / "set-aside" / "600-steps"
    assert directory == copy_ / "run" and summary["resumed_from_step"] == 200
    assert f"what came after step 200 is set aside in {aside}" in printed
    whole = finished / "run"
    assert results(directory) == results(whole)
    assert metrics(directory) == metrics(whole)
    # Nothing of what came after is lost.
    for name in ("metrics.jsonl", "summary.json", "policy/policy.safetensors"):
        assert (aside / name).read_bytes() == (whole / name).read_bytes()
    events = {path.name for path in whole.glob("events.*")}
    assert {path.name for path in aside.glob("events.*")} == events
    assert names(aside) == [name for name in names(whole) if name > Path(EARLIER).name]
    assert find_runs(str(copy_))[0] == [directory]  # not a seed of its own for plots
    assert job(copy_, f"resume={aside}", quick=False).directory == aside  # but can be continued


def test_the_best_policy_goes_with_the_steps_it_is_of(
    copy_: Path,
) -> None:
    step = manifest_metadata(copy_ / "run" / "policy-best")["step"]
    before = max(name for name in names(copy_ / "run") if int(name[5:17]) < step)
    run(copy_, f"resume=run/checkpoints/{before}", quick=False)
    aside = copy_ / "run" / "set-aside" / "600-steps"
    assert manifest_metadata(aside / "policy-best")["step"] == step
    assert manifest_metadata(copy_ / "run" / "policy-best")["step"] == step  # found again


def test_the_newest_checkpoint_sets_nothing_aside(copy_: Path) -> None:
    newest = names(copy_ / "run")[-1]
    longer = (f"resume=run/checkpoints/{newest}", "total_steps=700")
    directory, summary, _ = run(copy_, *longer, quick=False)
    assert (summary["steps"], summary["resumed_from_step"]) == (700, 600)
    assert not (directory / "set-aside").exists()


def test_a_checkpoint_is_continued_in_a_directory_of_its_own(finished: Path, copy_: Path) -> None:
    before = fingerprint(copy_ / "run")
    os.chmod(copy_ / "run", 0o500)  # it is read only
    chosen = (f"resume={EARLIER}", "run_dir=other")
    directory, summary, _ = run(copy_, *chosen, quick=False)
    os.chmod(copy_ / "run", 0o700)
    assert fingerprint(copy_ / "run") == before
    assert directory == copy_ / "other" and summary["resumed_from_step"] == 200
    assert results(directory) == results(finished / "run")
    assert metrics(directory) == metrics(finished / "run")
    assert names(directory)[0] == "step-000000000200"  # so that a kill at once loses nothing
    assert len([*directory.glob("events.*")]) == 2
    with pytest.raises(SettingError, match=f"holds a run already.*resume={directory}"):
        again = (f"resume={copy_ / EARLIER}", f"run_dir={directory}")
        open_run_of(job(copy_, *again, quick=False))


def test_killed_before_its_first_save_the_same_command_starts_again(copy_: Path) -> None:
    chosen = (f"resume={copy_ / EARLIER}", f"run_dir={copy_ / 'other'}")
    directory, _, _ = run(copy_, *chosen, quick=False)
    expected, newest = results(directory), names(copy_ / "run")[-1]
    shutil.rmtree(directory / "checkpoints")
    another = f"resume={copy_ / 'run' / 'checkpoints' / newest}"
    with pytest.raises(SettingError, match="holds a run already"):
        open_run_of(job(copy_, another, chosen[1], quick=False))
    assert results(run(copy_, *chosen, quick=False)[0]) == expected


def open_run_of(given: Any) -> None:
    from steadyrl.training.setup import open_run

    with open_run(given):
        raise AssertionError


def test_a_damaged_checkpoint_that_was_named_is_refused(copy_: Path) -> None:
    file = copy_ / EARLIER / "agent.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()
    file.write_bytes(content)
    before = fingerprint(copy_ / "run")
    _, _, printed = run(copy_, f"resume={EARLIER}", quick=False, code=3)
    assert "agent.safetensors: is damaged" in printed
    assert fingerprint(copy_ / "run") == before


def test_killed_while_setting_aside_the_command_continues(
    copy_: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the later checkpoints one is moved: the same command moves the others."""
    later = [name for name in names(copy_ / "run") if name > Path(EARLIER).name]
    assert len(later) > 1
    moved = []
    rename = os.rename

    def fail_at_second(old: Path, new: Path) -> None:
        if "checkpoints" in str(old):
            moved.append(old)
        if len(moved) == 2:
            raise OSError(28, "No space left on device")
        rename(old, new)

    chosen = job(copy_, f"resume={copy_ / EARLIER}", quick=False)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fail_at_second)
        with pytest.raises(SettingError, match="No space left"):
            open_run_of(chosen)
    with pytest.raises(AssertionError):
        open_run_of(job(copy_, f"resume={copy_ / EARLIER}", quick=False))
    there = [path.name for path in (copy_ / "run" / "set-aside").glob("*/checkpoints/*")]
    assert sorted(there) == later
    assert names(copy_ / "run")[-1] == "step-000000000200"


def refused(folder: Path, resume: str) -> list[str]:
    with pytest.raises((CheckpointError, SettingError)) as error:
        job(folder, f"resume={resume}", quick=False)
    return error_lines(error.value)


def test_what_is_no_run_is_refused_with_what_there_is(copy_: Path) -> None:
    here = copy_ / "run"
    [line] = refused(copy_, f"{here}/checkpoints/step-000000000123")
    assert "no such checkpoint; there are step-000000000000, step-" in line
    [line] = refused(copy_, f"{here}/policy")
    assert f"is a policy, and has no checkpoint to continue from; start a new run from it with "\
        f"init_from={here}/policy" in line  # fmt: skip
    [line] = refused(copy_, f"{here}/config.yaml")
    assert line.endswith(f"is a file; name the run's directory: resume={here}")
    [line] = refused(copy_, f"{copy_}/nowhere")
    assert "no such directory" in line
    [line] = refused(copy_, f"{copy_}/rum")
    assert line.endswith(f"no such directory; did you mean {here}?")
    assert job(copy_, f"resume={here}/checkpoints", quick=False).directory == here


def test_a_folder_of_runs_names_its_newest(copy_: Path) -> None:
    for age, name in enumerate(("a b", "c", "d", "e")):
        (copy_ / "more" / name / "checkpoints").mkdir(parents=True)
        config = copy_ / "more" / name / "config.yaml"
        config.write_text("")
        os.utime(config, (10**9 - age, 10**9 - age))
    line, *commands = refused(copy_, str(copy_))
    assert line.endswith("is no run and has no checkpoint to continue from; the newest runs in it:")
    assert commands == [
        f"  {command_of()} resume={copy_}/run  # finished, 600 steps",
        f"  {command_of()} 'resume={copy_}/more/a b'  # no end yet, ? steps",
        f"  {command_of()} resume={copy_}/more/c  # no end yet, ? steps",
    ]


def test_init_from_another_shape_says_two_lines(finished: Path, tmp_path: Path) -> None:
    chosen = (f"init_from={finished / 'run'}", "agent.hidden=[32]", "run_dir=another")
    _, _, printed = run(tmp_path, *chosen, code=3)
    first, second = printed[printed.index("error: ") :].splitlines()
    assert first == (
        f"error: init_from={finished / 'run'}: does not fit this run: trunk.layers.0.weight is "
        "[16, 4] there and [32, 4] here, and 2 more weights differ"
    )
    assert second == "  agent.hidden=[16] there and [32] here"


@pytest.mark.parametrize("twice", [False, True])
def test_after_a_signal_the_last_line_continues_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], twice: bool
) -> None:
    on_steps = Run.on_steps

    def signalled(self: Run, *args: Any) -> None:
        on_steps(self, *args)
        if self.steps == 50:
            self._services.saver.checkpoints.wait()  # there is one to go on from
            os.kill(os.getpid(), signal.SIGINT)
            if twice:
                os.kill(os.getpid(), signal.SIGINT)

    wrapped = (
        "env.wrappers=[{TimeLimit: {max_episode_steps: 9}}, {own_wrappers:Scaled: {factor: 3}}]"
    )
    chosen = job(tmp_path / "a b", "total_steps=300", escape_colons(wrapped))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Run, "on_steps", signalled)
        with suppress(KeyboardInterrupt) if twice else nullcontext():
            train(chosen)
    printed = capfd.readouterr()
    last = printed.out.splitlines()[-1]
    assert last.startswith(f"resume: {command_of()} ")
    typed = [escape_colons(text) for text in shlex.split(last)[3:]]
    assert typed[0] == f"resume={tmp_path / 'a b' / 'run'}"
    again = job(tmp_path / "a b", *typed, quick=False)
    assert (again.directory, again.continues) == (chosen.directory, ())


def test_modules_of_a_run_are_refused_once_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrapped = "env.wrappers=[own_wrappers:Scaled, {own_wrappers:Scaled: {factor: 3}}]"
    chosen = ("env.id=counter_envs:CartPole-v1", escape_colons(wrapped))
    train(job(tmp_path, "total_steps=300", *chosen, "checkpoint.every=100"))
    here = tmp_path / "run"
    for more in ([], ["env.id=CartPole-v1"], ["total_steps=400"]):
        with pytest.raises(CheckpointError) as error:
            job(tmp_path, f"resume={here}", *more, quick=False)
        line, command = error_lines(error.value)
        assert "env.id=counter_envs:CartPole-v1 and env.wrappers=own_wrappers:Scaled" in line
        assert len(line) < 400
        typed = [escape_colons(text) for text in shlex.split(command)[2:]]
        kept = [text for text in more if text.startswith("total_steps")]
        assert typed == [f"resume={here}", f"run_dir={here}", *kept, *chosen]
        assert job(tmp_path, *typed, quick=False).directory == here
    for more in ([], ["--env", "id=CartPole-v1"]):
        with pytest.raises(SystemExit) as refused_:
            evaluate([str(here), *more])
        assert refused_.value.code == 3
        _, command = capsys.readouterr().err.splitlines()
        assert command.startswith(f"  {command_of('evaluate')} {here} ")
        evaluate([*shlex.split(command)[2:], "--episodes", "1", "--json"])
        assert '"episodes": 1' in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"\n  env=\['id=counter_envs:CartPole-v1', 'wrap"):
        steadyrl.evaluate(here)


def test_the_runs_own_agent_may_be_typed_again(copy_: Path) -> None:
    """`agent=dqn` is a run's agent, not all the defaults of its keys."""
    again = job(copy_, f"resume={copy_ / 'run'}", "agent=dqn", "total_steps=700", quick=False)
    assert again.continues == ("total_steps=700 (was 600)",)
    with pytest.raises(SettingError, match=r"agent\.gamma=0\.5: cannot change"):
        job(copy_, f"resume={copy_ / 'run'}", "agent=dqn", "agent.gamma=0.5", quick=False)
    with pytest.raises(SettingError, match=r"\(it was \S+; experiment=cartpole_dqn sets it: leave"):
        job(copy_, f"resume={copy_ / 'run'}", "experiment=cartpole_dqn", quick=False)


def test_evaluating_a_folder_of_runs_names_the_newest(
    copy_: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy_ / "below" / "a b").mkdir(parents=True)
    shutil.copytree(copy_ / "run", copy_ / "below" / "a b" / "run")
    os.utime(copy_ / "run" / "config.yaml", (10**9, 10**9))
    with pytest.raises(SystemExit) as ended:
        evaluate([str(copy_)])
    assert ended.value.code == 2
    line, *commands = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{copy_}: neither a run nor a policy; the newest runs in it:")
    assert commands == [
        f"  '{copy_}/below/a b/run'  # finished, 600 steps",
        f"  {copy_}/run  # finished, 600 steps",
    ]
