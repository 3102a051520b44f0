"""Hyper-parameter studies: validation, resuming, presets and failed trials."""

import json
import os
import resource
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from command import ROOT, environment

from steadyrl.core.command.typed import command_of
from steadyrl.training.cli import population, tune
from steadyrl.training.cli.main import main
from steadyrl.training.run.job import compose_one
from steadyrl.training.sweeps import subprocess_run as children
from steadyrl.training.tuning import results
from steadyrl.training.tuning.results import mean_score, write_preset
from steadyrl.training.tuning.search_space import Range, StudyError, job_of, typed

STUDY = {
    "name": "test_study",
    "overrides": ["agent=ppo", "env=cartpole", "total_steps=2000", "eval.every=1000"],
    "space": {"agent.gamma": {"low": 0.9, "high": 0.99}},
}


def written(folder, /, **changes):
    path = folder / "study.yaml"
    path.write_text(json.dumps(STUDY | {"folder": str(folder / "study"), **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"space": {"agent.gama": [0.9, 1]}}, ["agent.gama", "agent.gamma"]),
        ({"space": {"agent.gamma": {"low": 0.9, "high": 7}}}, ["agent.gamma=7", "between 0 and 1"]),
        ({"space": {"agent.gamma": {"low": 0.9, "high": 0.1}}}, ["space.agent.gamma", "below"]),
        ({"space": {"agent.gamma": {"low": 0, "high": 1, "log": True}}}, ["above 0"]),
        ({"space": {"agent.gamma": 3}}, ["space.agent.gamma", "low: …"]),
        ({"space": {}}, ["space", "needs keys"]),
        ({"spaces": {}}, ["spaces", "did you mean space"]),
        ({"overrides": ["agent=ppoo"]}, ["agent=ppoo", "ppo"]),
        ({"overrides": ["eval.every=0"]}, ["eval.every=0", "evaluations"]),
        ({"pruner": "sharp"}, ["pruner=sharp", "asha"]),
        ({"trials": "many"}, ["trials=many"]),
        ({"name": "cartpole_ppo"}, ["name=cartpole_ppo", "existing preset"]),
        ({"name": "../x"}, ["name=../x", "letters"]),
        ({"name": ["a"]}, ["name=[a]", "must be text"]),
        ({"trials": True}, ["trials=true", "integer"]),
        ({"trials": "4"}, ["trials=4", "without quotes"]),
        ({"overrides": "agent=ppo"}, ["overrides=agent=ppo", "must be a list"]),
        ({"seeds": ["a"]}, ["seeds=[a]", "integers"]),
        ({"seeds": [3, 3]}, ["seeds=[3,3]", "twice"]),
        ({"check_seeds": [1, 2, 1]}, ["check_seeds=[1,2,1]", "twice"]),
        ({"check_seeds": [1, 0]}, ["check_seeds=[1,0]", "seed 0 is one of seeds"]),
        (
            {"space": {"agent.gamma": {"low": 0, "high": 1, "log": "no"}}},
            ["log=no", "true or false"],
        ),
        ({"check_seeds": [-1]}, ["check_seeds=[-1]", "integers"]),
        ({"storage": 3}, ["storage=3", "must be text"]),
        ({"folder": ["a"]}, ["folder=[a]", "must be text"]),
        ({"folder": "/dev/null/a"}, ["folder=/dev/null/a", "is a file"]),
    ],
)
def test_invalid_plans_are_rejected_in_one_line(tmp_path, capsys, changes, words):
    with pytest.raises(SystemExit) as ended:
        tune.main([str(written(tmp_path, **changes))])
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(printed.splitlines()) == 1
    for word in words:
        assert word in printed
    assert not (tmp_path / "study").exists()


def test_an_error_of_the_disk_during_the_study_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "open_study", lambda plan: None)
    (tmp_path / "study" / ".planning").mkdir(parents=True)  # in place of the file
    with pytest.raises(SystemExit) as ended:
        tune.main([str(written(tmp_path))])
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"error: folder={tmp_path / 'study'}: IsADirectoryError: ")
    assert "the same command resumes" in line


def test_values_are_written_as_the_command_line_reads_them():
    assert typed("agent.gamma", 0.1 + 0.2) == "agent.gamma=0.30000000000000004"
    assert typed("agent.hidden", [64, 64]) == "agent.hidden=[64,64]"
    assert typed("agent.clip_value", True) == "agent.clip_value=true"
    assert typed("agent.network.activation", "tanh") == "agent.network.activation='tanh'"
    assert Range(low=1, high=20).whole and not Range(low=1, high=2.0).whole


def test_ends_of_a_range_have_the_type_of_their_key(tmp_path):
    path = written(tmp_path)
    path.write_text("""
        name: test_study
        overrides: [agent=ppo, env=pendulum]
        space:
          agent.rollout_steps: {low: 1e2, high: 1.0e3, log: true}
          agent.learning_rate: {low: 1, high: 2}
          env.kwargs.g: {low: 8, high: 9}
          agent.hidden: [[16], [32]]
    """)
    space = tune.read_plan(path).space
    assert space["agent.rollout_steps"].whole and space["agent.rollout_steps"].low == 100
    assert not space["agent.learning_rate"].whole
    assert space["env.kwargs.g"].whole
    path.write_text(path.read_text().replace("1e2", "1.5e-1"))
    with pytest.raises(StudyError, match=r"space\.agent\.rollout_steps: .*must be an integer"):
        tune.read_plan(path)


def test_another_study_of_the_same_name_is_rejected(tmp_path):
    pytest.importorskip("optuna")
    plan = tune.read_plan(written(tmp_path))
    tune.open_study(plan)
    other = tune.read_plan(written(tmp_path, seeds=[7]))
    with pytest.raises(StudyError, match="has another study named test_study"):
        tune.open_study(other)
    tune.open_study(plan)  # the same study is resumed


def test_an_unusable_storage_is_rejected(tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "journal").write_text("no journal\n")
    plan = tune.read_plan(written(tmp_path, storage=str(tmp_path / "journal")))
    with pytest.raises(StudyError, match="cannot be used"):
        tune.open_study(plan)


def test_lists_and_mappings_are_passed_in_full():
    wrappers = [{"own:Scale": {"by": 1 / 3, "name": "x y" * 30, "on": [True, None]}}]
    assert compose_one([typed("env.wrappers", wrappers)]).env.wrappers == wrappers
    assert tune._texts([[64, 64], 0.5]) == ["[64,64]", "0.5"]
    assert tune._texts([[0.1234567], [0.1234568]]) == ["[0.1234567]", "[0.1234568]"]


@pytest.mark.slow
def test_a_killed_study_resumes_and_finishes(tmp_path):
    pytest.importorskip("optuna")
    study = written(
        tmp_path, trials=3, seeds=[0], check_seeds=[9], pruner="none", name="test_study_killed"
    )
    command = [sys.executable, str(ROOT / "scripts" / "tune.py"), str(study)]
    preset = tmp_path / "study" / "experiment" / "test_study_killed.yaml"
    first = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert "study: 1/3 trials done" in first.stdout.readline()
    while not (tmp_path / "study" / "trials" / "1" / "seed-0" / "config.yaml").exists():
        os.sched_yield()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 1 was interrupted: resuming it" in done.stdout
    assert "study: 3/3 trials done" in done.stdout
    assert "| seed | best | default |" in done.stdout
    assert "gamma:" in preset.read_text()
    # The last lines are a command that trains with the best settings.
    assert f"--config-dir {tmp_path / 'study'} experiment=test_study_killed" in done.stdout
    assert not (ROOT / "configs" / "experiment" / "test_study_killed.yaml").exists()
    assert (tmp_path / "study" / "history.png").stat().st_size > 1000


@pytest.mark.parametrize("overrides", [["agent=ppo", "env=acrobot"], ["experiment=acrobot_ppo"]])
def test_the_studys_preset_is_found_in_its_folder(tmp_path, monkeypatch, capsys, overrides):
    plan = tune.read_plan(written(tmp_path, overrides=overrides))
    plan.preset.parent.mkdir(parents=True)
    write_preset(plan, ["agent.gamma=0.875"], -90.0)
    typed = ["--config-dir", str(plan.folder), "experiment=test_study", "--cfg", "job"]
    monkeypatch.setattr(sys, "argv", ["train.py", *typed])
    main(lambda job: None)
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["agent"]["name"], shown["agent"]["gamma"]) == ("ppo", 0.875)
    assert shown["env"]["id"] == "Acrobot-v1"
    tune.read_plan(written(tmp_path))  # the study's own preset is accepted
    plan.preset.write_text("agent: {}")
    with pytest.raises(StudyError, match="is an existing preset"):
        tune.read_plan(written(tmp_path))


def test_a_full_disk_leaves_no_half_preset_and_the_study_goes_on(tmp_path):
    plan = tune.read_plan(written(tmp_path))
    plan.preset.parent.mkdir(parents=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_preset(plan, ["agent.gamma=0.875"], -90.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(plan.preset.parent.iterdir())
    plan.preset.touch()  # cut off, as versions left it that wrote in place
    write_preset(tune.read_plan(written(tmp_path)), ["agent.gamma=0.875"], -90.0)
    assert "gamma: 0.875" in plan.preset.read_text()


@pytest.mark.parametrize("kwargs", ["env.kwargs.g=5", "env.kwargs={g: 5}", "++env.kwargs.g=5"])
def test_the_environments_keyword_arguments_are_set_and_searched(tmp_path, kwargs):
    own = {"overrides": ["agent=ppo", "env=pendulum", kwargs], "space": {"env.kwargs.g": [8, 9]}}
    plan = tune.read_plan(written(tmp_path, **own))
    assert job_of(plan.overrides, plan.folder).settings.run.env.kwargs == {"g": 5}


def test_an_unwritable_folder_is_rejected_before_the_first_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StudyError, match=r"folder=.*/study: .* cannot be written to"):
        tune.read_plan(written(tmp_path))


def test_an_unwritable_working_directory_matters_only_when_used(tmp_path, monkeypatch):
    here, access = tmp_path / "here", os.access
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(os, "access", lambda path, mode: path != here and access(path, mode))
    assert tune.read_plan(written(tmp_path)).folder == tmp_path / "study"
    place = rf"folder={here}/outputs/tuning/test_study: {here} cannot be written to"
    with pytest.raises(StudyError, match=f"{place}; name another place with folder:"):
        tune.read_plan(written(tmp_path, folder=None))
    assert not list(here.iterdir())


def test_the_mean_score_skips_missing_scores_and_counts_0():
    assert mean_score([0.0, None, -4.0]) == -2.0
    assert mean_score([0.0]) == 0.0
    assert mean_score([None]) is None


class Trial:
    """A trial that always suggests the same values."""

    number = 0

    def suggest_float(self, key, low, high, *, log):
        return low

    def report(self, value, rung):
        pass

    def should_prune(self):
        return False


class Study:
    """A study that records its results."""

    def __init__(self):
        self.trials = [SimpleNamespace(intermediate_values={})]
        self.results = []

    def tell(self, trial, value=None, state=None):
        self.results.append(value if state is None else state.name)


TRAINER = """import json, os, signal, sys
from pathlib import Path
[place] = [Path(t.partition("=")[2].strip("'")) for t in sys.argv if t.startswith("run_dir=")]
place.mkdir(parents=True, exist_ok=True)
with (place / "starts").open("a") as file:
    file.write("x")
if (place / "starts").stat().st_size <= %d:
    %s
(place / "summary.json").write_text(json.dumps({"status": "finished", "eval_return_mean": 0.0}))
"""


@pytest.mark.parametrize(
    ("times", "end", "result"),
    [
        (2, "os.kill(os.getpid(), signal.SIGKILL)", 0.0),  # resumed; a score of 0 counts
        (9, "os.kill(os.getpid(), signal.SIGKILL)", "FAIL"),
        (1, "os._exit(143)", 0.0),
        (1, "os._exit(0)", "FAIL"),
        (1, "os._exit(5)", "FAIL"),
    ],
)
def test_a_killed_trial_is_resumed_and_a_failed_one_fails(
    tmp_path, monkeypatch, capsys, times, end, result
):
    pytest.importorskip("optuna")
    monkeypatch.setattr(children, "PROGRAM", tmp_path / "train.py")
    (tmp_path / "train.py").write_text(TRAINER % (times, end))
    plan, study = tune.read_plan(written(tmp_path, seeds=[3])), Study()
    tune.run_trial(plan, study, Trial())
    assert study.results == [result]
    printed = capsys.readouterr().out
    assert ("was interrupted" in printed) == (times != 1 or "143" in end)
    assert ("trial 0 failed: " in printed) == (result == "FAIL")


@pytest.mark.parametrize("said", ["error: no such game", "no line of an error"])
def test_a_study_whose_trials_all_fail_says_why(tmp_path, monkeypatch, said):
    pytest.importorskip("optuna")
    monkeypatch.setattr(children, "PROGRAM", tmp_path / "train.py")
    (tmp_path / "train.py").write_text(f"print({said!r}); raise SystemExit(2)")
    plan = tune.read_plan(written(tmp_path, trials=2, seeds=[3]))
    why = "no such game" if "error:" in said else f"see {plan.folder}/trials/1/out.log"
    with pytest.raises(StudyError, match=f"no best one; trial 1 failed: {why}$"):
        tune.tune(plan)


def test_the_time_left_of_a_study_counts_training_alone(tmp_path, capsys):
    """Neither the time that a study was stopped, nor killed trials as running."""
    plan = tune.read_plan(written(tmp_path, trials=5, seeds=[0, 1]))
    for number, seconds in ((0, 60.0), (1, 120.0)):
        for seed in plan.seeds:
            place = plan.folder / "trials" / str(number) / f"seed-{seed}"
            place.mkdir(parents=True)
            summary = {"status": "finished", "wall_seconds": seconds - seed}
            (place / "summary.json").write_text(json.dumps(summary))
    held = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    (plan.folder / "trials" / "3").mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", f"{held}; print(flush=True); input()",
         plan.folder / "trials" / "3" / ".lock"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert other.stdout.readline()
    states = ("COMPLETE", "PRUNED", "RUNNING", "RUNNING")  # trial 2 was killed
    trials = [
        SimpleNamespace(
            number=number,
            state=SimpleNamespace(name=name, is_finished=lambda name=name: name != "RUNNING"),
        )
        for number, name in enumerate(states)
    ]
    study = SimpleNamespace(
        get_trials=lambda deepcopy: trials, best_value=1.0, best_trial=trials[0]
    )
    tune.say_progress(plan, study)
    other.communicate("\n")
    assert capsys.readouterr().out == (
        "study: 2/5 trials done, 1 running, 1 pruned, 0 failed, best 1.0 (trial 0), "
        "about 0:02:15 left\n"
    )


def test_the_best_settings_of_more_trials_are_scored_in_runs_of_their_own(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(children, "PROGRAM", tmp_path / "train.py")
    (tmp_path / "train.py").write_text(TRAINER % (0, "pass"))
    monkeypatch.setattr(results, "draw", lambda plan, study: None)
    plan = tune.read_plan(written(tmp_path, check_seeds=[1000]))
    plan.preset.parent.mkdir(parents=True)
    for best in ("agent.gamma=0.9", "agent.gamma=0.8", "agent.gamma=0.8"):
        results.write_results(plan, SimpleNamespace(best_value=1.0), [best])
        assert json.loads((plan.folder / "check.json").read_text()) == {
            "best": [0.0],
            "default": [0.0],
        }
    of_best = sorted((plan.folder / "check").glob("best-*/seed-1000/starts"))
    assert [path.read_text() for path in of_best] in (["x", "xx"], ["xx", "x"])
    (tmp_path / "train.py").write_text("print('error: no such game'); raise SystemExit(2)")
    results.write_results(plan, SimpleNamespace(best_value=1.0), ["agent.gamma=0.7"])
    assert "best, seed-1000: no score (no such game)" in capsys.readouterr().out


@pytest.mark.parametrize(("best", "said"), [(1.0, True), (2.0, False), (None, False)])
def test_default_settings_that_score_higher_are_named(tmp_path, monkeypatch, capsys, best, said):
    monkeypatch.setattr(children, "PROGRAM", tmp_path / "train.py")
    (tmp_path / "train.py").write_text(TRAINER % (0, "pass"))
    monkeypatch.setattr(results, "draw", lambda plan, study: None)
    monkeypatch.setattr(results, "_score", lambda group, _: {"best": best, "default": 2.0}[group])
    plan = tune.read_plan(written(tmp_path, check_seeds=[1000]))
    plan.preset.parent.mkdir(parents=True)
    results.write_results(plan, SimpleNamespace(best_value=1.0), ["agent.gamma=0.9"])
    assert ("the default settings score higher on check_seeds" in capsys.readouterr().out) is said


@pytest.mark.parametrize("name", ["tune", "population"])
def test_without_a_file_the_example_is_named_and_valid(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program, example = {
        "tune": (tune, "study.yaml"), "population": (population, "population.yaml")
    }[name]  # fmt: skip
    for typed_, file in (([], example), (["my own.yaml"], "'my own.yaml'")):
        with pytest.raises(SystemExit) as ended:
            program.main(typed_)
        assert ended.value.code == 2
        line, copy, start = capsys.readouterr().err.splitlines()
        assert line.endswith("; copy the example, edit it and start it:")
        assert start == f"  {command_of(name)} {file}"
        subprocess.run(copy, shell=True, check=True)
    text = (tmp_path / "my own.yaml").read_text()
    read = tune.read_plan if name == "tune" else population.read_plan
    assert read(tmp_path / example).space.keys()
    assert text in (ROOT / "docs" / "many-runs.md").read_text()
