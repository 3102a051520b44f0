"""Population-based training: validation, lineage, moved and killed populations."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from command import ROOT, environment

from steadyrl.core.errors import MemoryBudgetError
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    manifest_of,
    saved_below,
    verified_metadata,
)
from steadyrl.training.cli import population
from steadyrl.training.sweeps.subprocess_run import Outcome
from steadyrl.training.tuning import members
from steadyrl.training.tuning.members import (
    GenerationLog,
    Member,
    MemberError,
    ancestors,
    draw_lineage,
    latest_of_each,
    read_members,
    train_generation,
    wait_for_members,
)
from steadyrl.training.tuning.search_space import StudyError

PLAN = {
    "name": "test",
    "overrides": ["agent=ppo", "env=cartpole", "agent.rollout_steps=64", "eval.episodes=2"],
    "space": {"agent.learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}},
    "interval": 256,
    "members": 2,
    "generations": 2,
}
OWN = [
    *PLAN["overrides"],
    "eval.every=256",
    "agent.anneal_learning_rate=constant",
    "agent.hidden=[16]",
]


def written(folder, /, **changes):
    path = folder / "population.yaml"
    path.write_text(json.dumps(PLAN | {"folder": str(folder / "all")} | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"space": {"agent.lerning_rate": {"low": 0.1, "high": 1.0}}}, 2, ["agent.learning_rate"]),
        ({"space": {"agent.gamma": {"low": 0.5, "high": 7.0}}}, 2, ["agent.gamma=7", "between"]),
        ({"space": {"agent.rollout_steps": {"low": 8, "high": 64}}}, 2, ["may be searched"]),
        ({"space": {"agent.hidden": [[8], [16]]}}, 2, ["may be searched"]),
        (
            {
                "overrides": [
                    "agent=ppo",
                    "agent.rollout_steps=64",
                    "agent.learning_rate_end=1e-5",
                ],
                "space": {"agent.gamma": {"low": 0.5, "high": 0.99}},
            },
            2,
            ["populations have no schedules", "agent.learning_rate_end=1e-05"],
        ),
        ({"members": 1}, 2, ["members=1", "2 or more"]),
        ({"method": "magic"}, 2, ["method=magic", "evolution"]),
        ({"quantile": 0.9}, 2, ["quantile=0.9"]),
        ({"workers": "4"}, 2, ["workers=4", "without quotes"]),
        ({"workers": 0}, 2, ["workers=0", "1 or more"]),
        ({"workers": True}, 2, ["workers=true", "integer"]),
        ({"interval": "many"}, 2, ["interval=many", "integer"]),
        ({"resample": 2.0}, 2, ["resample=2.0"]),
        ({"overrides": "agent=ppo"}, 2, ["overrides=agent=ppo", "list"]),
        ({"address": 3}, 2, ["address=3", "text"]),
        ({"name": "a/b"}, 2, ["name=a/b", "letters"]),
        ({"folder": "/dev/null/a"}, 2, ["is a file"]),
        ({"members": 20_000, "workers": 20_000}, 7, ["20000 parallel members", "available"]),
    ],
)
def test_invalid_plans_are_rejected_in_one_line(tmp_path, capsys, changes, code, words):
    with pytest.raises(SystemExit) as ended:
        population.main([str(written(tmp_path, **changes))])
    printed = capsys.readouterr().err
    assert (ended.value.code, len(printed.splitlines())) == (code, 1)
    for word in words:
        assert word in printed
    assert not (tmp_path / "all").exists()


def test_the_memory_check_counts_the_steps_of_all_generations(tmp_path, monkeypatch):
    """A run's replay grows with the number of generations, not with the number of members."""
    monkeypatch.setattr(
        "steadyrl.training.tuning.population.available_bytes", lambda: 2 * 452_500_000
    )
    small = {"overrides": ["agent=dqn", "env=cartpole"], "interval": 10_000, "workers": 2}
    population.read_plan(written(tmp_path, **small, members=1000, generations=3))
    with pytest.raises(MemoryBudgetError, match="2 parallel members need about"):
        population.read_plan(written(tmp_path, **small, members=2, generations=1000))


def test_an_unwritable_working_directory_matters_only_when_used(tmp_path, monkeypatch):
    folder, access = tmp_path / "here", os.access
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and access(path, mode))
    assert population.read_plan(written(tmp_path)).folder == tmp_path / "all"
    with pytest.raises(StudyError, match="name another place with folder:"):
        population.read_plan(written(tmp_path, folder=None))
    assert not list(folder.iterdir())


def test_workers_are_limited_to_the_number_of_members(tmp_path):
    assert population.read_plan(written(tmp_path, workers=50, interval=256.0)).workers == 2


def test_missing_ray_is_named_with_its_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as ended:
        population.main([str(written(tmp_path))])
    assert ended.value.code == 2
    assert 'pip install -e ".[ray]"' in capsys.readouterr().err


def test_a_population_is_resumed_with_the_settings_it_was_started_with(tmp_path):
    plan = population.read_plan(written(tmp_path))
    population.validate_same(plan)  # nothing was started yet
    plan.folder.mkdir()
    (plan.folder / "plan.json").write_text(json.dumps({"digest": plan.digest}))
    population.validate_same(population.read_plan(written(tmp_path, workers=1, address="auto")))
    wider = {"agent.learning_rate": {"low": 1e-6, "high": 1e-2, "log": True}}
    for changes in ({"generations": 3}, {"space": wider}, {"overrides": PLAN["overrides"][:-1]}):
        with pytest.raises(StudyError, match="has another population named test"):
            population.validate_same(population.read_plan(written(tmp_path, **changes)))


def test_a_population_that_did_not_finish_ends_with_an_error(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plan = population.read_plan(written(tmp_path))
    failure = MemberError("a, generation 1: failed: no such game")
    with pytest.raises(StudyError, match=r"no member finished a generation\n  .* no such game"):
        population.report(plan, [failure])
    member = Member("a", 1, 1.0, {"agent.gamma": 0.9}, None, str(plan.folder / "a"))
    place = plan.folder / "generation-001" / "a"
    place.mkdir(parents=True)
    (place / "member.json").write_text(json.dumps(member.plain(plan.folder)))
    with pytest.raises(StudyError, match=r"ended in generation 1 of 2; run .*\n  .* no such game"):
        population.report(plan, [failure])
    assert "| a | 1.0 | agent.gamma=0.9 |" in capsys.readouterr().out
    population.report(plan._replace(generations=1), [failure])
    assert (
        "a member failed: MemberError: a, generation 1: failed: no such game"
        in capsys.readouterr().out
    )


def test_ancestors_lead_to_the_first_generation(tmp_path):
    pytest.importorskip("matplotlib")
    members = [
        Member("a", 1, 1.0, {}, None, "1a"), Member("b", 1, 5.0, {}, None, "1b"),
        Member("a", 2, 6.0, {}, "1b", "2a"), Member("b", 2, 4.0, {}, "1b", "2b"),
    ]  # fmt: skip
    assert [(m.name, m.generation) for m in ancestors(members, members[2])] == [("b", 1), ("a", 2)]
    draw_lineage(members, tmp_path / "lineage.png")
    assert (tmp_path / "lineage.png").stat().st_size > 1000


def test_a_repeated_generation_counts_once_with_its_latest_score(tmp_path):
    one, other, again = (str(tmp_path / name) for name in ("1a", "1b", "1a-again"))
    members_ = [
        Member("a", 1, 9.0, {}, None, one), Member("b", 1, 2.0, {}, None, other),
        Member("a", 1, 3.0, {}, other, again),
    ]  # fmt: skip
    for at, (member, folder) in enumerate(zip(members_, ("z", "y", "x"), strict=True)):
        directory = tmp_path / "generation-001" / folder
        directory.mkdir(parents=True)
        (directory / "member.json").write_text(json.dumps(member.plain(tmp_path)))
        os.utime(directory / "member.json", (at, at))
    assert read_members(tmp_path) == members_
    (directory / "member.json").write_text("[1")
    with pytest.raises(MemberError, match=r"a member\.json cannot be read") as refused:
        read_members(tmp_path)
    assert refused.value.exit_code == 2
    assert {(m.name, m.score) for m in latest_of_each(members_)} == {("a", 3.0), ("b", 2.0)}


def ended(folder, scores, generation):
    """Return members that have ended a generation; their names' digits are their trees' memory."""
    found = []
    for name, score in scores.items():
        run = folder / f"{name}-{generation}"
        run.mkdir()
        whole = 100.0 * int(name[-1])
        peaks = {"rss_mb_peak": whole / 2, "tree_mb_peak": whole}
        (run / "summary.json").write_text(json.dumps(peaks))
        found.append(Member(name, generation, score, {}, None, str(run)))
    return found


def test_each_generation_has_one_line_once_all_members_have_ended_it(tmp_path):
    now = [100.0]
    log = GenerationLog(2, 3, clock=lambda: now[0])
    found = ended(tmp_path, {"m1": 10.0}, 1)
    assert log.lines(found) == []
    found += ended(tmp_path, {"m1": 30.0}, 2)  # it does not wait for the other
    assert log.lines(found) == []
    now[0] = 140.0
    found += ended(tmp_path, {"m2": -5.0}, 1)
    first = ["generation 1/3: 40 s (mean 40 s), best score 10.0 (mean 2.5), RAM 200 MB"]
    assert log.lines(found) == first and log.lines(found) == []
    now[0] = 160.0
    found += ended(tmp_path, {"m2": 0.5}, 2)
    assert log.lines(found) == [
        "generation 2/3: 20 s (mean 30 s), best score 30.0 (mean 15.2), RAM 200 MB"
    ]
    goes_on = copy.deepcopy(log)  # by Ray, for a population that goes on
    found += ended(tmp_path, {"m1": 1.0}, 3)
    assert goes_on.lines(found) == []
    found += ended(tmp_path, {"m2": 1.0}, 3)
    (line,) = goes_on.lines(found)
    assert re.match(r"generation 3/3: \d+ s since the restart, best score 1.0 ", line)
    found += ended(tmp_path, {"m1": 1.0, "m2": 1.0}, 4)
    (line,) = goes_on.lines(found)
    assert re.match(r"generation 4/3: \d+ s \(mean \d+ s\), ", line) and len(line) < 80


class FinishedRun:
    """A run that finishes at once."""

    def __init__(self, overrides, directory, **_):
        (directory / "config.yaml").touch()

    def wait(self):
        return Outcome("finished", 0, 1.0)


def test_a_moved_population_finds_its_members(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "RunProcess", FinishedRun)
    monkeypatch.setattr(members, "fork_checkpoint", lambda source, target, config: 0)
    before_move, folder = tmp_path / "there", tmp_path / "here"
    first = train_generation(before_move, "a", 1, None, OWN, {"agent.gamma": 0.9}, 256)
    second = train_generation(before_move, "b", 2, first.run_dir, OWN, {"agent.gamma": 0.8}, 256)
    assert read_members(before_move) == [first, second]
    before_move.rename(folder)
    moved = read_members(folder)
    assert all(Path(member.run_dir).is_relative_to(folder) for member in moved)
    assert ancestors(moved, moved[1]) == moved
    again = train_generation(folder, "b", 2, moved[0].run_dir, OWN, {"agent.gamma": 0.8}, 256)
    assert again == moved[1]


@pytest.mark.slow
def test_a_member_forks_another_with_other_settings(tmp_path):
    slow_rate, fast_rate = {"agent.learning_rate": 5e-4}, {"agent.learning_rate": 1e-3}
    first = train_generation(tmp_path, "a", 1, None, OWN, fast_rate, 256)
    second = train_generation(tmp_path, "b", 2, first.run_dir, OWN, slow_rate, 256)
    again = train_generation(tmp_path, "b", 2, first.run_dir, OWN, slow_rate, 256)
    assert (again, second.parent) == (
        second,
        first.run_dir,
    )  # a finished generation is not run again
    assert {m.run_dir for m in read_members(tmp_path)} == {first.run_dir, second.run_dir}
    saved = saved_below(Path(second.run_dir) / "checkpoints")
    assert verified_metadata(saved[0].path)["config"]["agent"]["learning_rate"] == 5e-4
    summaries = [
        json.loads((Path(m.run_dir) / "summary.json").read_text()) for m in (first, second)
    ]
    assert saved[-1].step >= summaries[0]["steps"] >= 256  # it never restarted from step 0
    assert summaries[1]["steps"] >= 512
    with pytest.raises(CheckpointError):
        manifest_of(tmp_path)


@pytest.mark.slow
def test_a_small_population_finishes(tmp_path):
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "population.py"), str(written(tmp_path))],
        env=environment(), capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generation 2/2: " in done.stdout
    assert len(json.loads((tmp_path / "all" / "lineage.json").read_text())) == 4


@pytest.mark.slow
def test_ctrl_c_ends_a_population_with_its_own_exit_code(tmp_path):
    pytest.importorskip("ray")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "population.py"),
         str(written(tmp_path, generations=100))],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert any("generation 1/100: " in line for line in process.stdout)  # until then
    process.send_signal(signal.SIGINT)
    printed = process.communicate()[0]
    assert (process.returncode, "Traceback" in printed) == (130, False), printed


@pytest.mark.slow
def test_a_signal_to_all_processes_ends_a_population_once_its_members_are_saved(tmp_path):
    """As Slurm's --signal=USR2@60 sends it: a process of Ray dies by it, and its member saves."""
    pytest.importorskip("ray")
    never = ["checkpoint.seconds=0", "checkpoint.every=1e9"]
    plan = written(tmp_path, overrides=[*PLAN["overrides"], *never], interval=10**9)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "population.py"), str(plan)],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, cwd=tmp_path,
    )  # fmt: skip
    runs = tmp_path / "all" / "generation-001"
    while sum("step" in path.read_text() for path in runs.glob("*/metrics.jsonl")) < 2:
        assert process.poll() is None
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        each.send_signal(signal.SIGUSR2)
    assert process.wait() == 128 + signal.SIGUSR2
    for run in runs.iterdir():
        summary = json.loads((run / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert saved_below(run / "checkpoints")[0].step == summary["steps"] > 0


def test_whoever_waits_for_members_does_so_until_none_is_in_use(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(members, "wait_until_free", waited.append)
    for place in ("generation-001/a", "generation-001/b", "generation-002/a", "ray/t"):
        (tmp_path / place).mkdir(parents=True)
    wait_for_members(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in waited} == {
        "generation-001/a", "generation-001/b", "generation-002/a"
    }  # fmt: skip


@pytest.mark.slow
def test_a_killed_and_moved_population_resumes(tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, str(ROOT / "scripts" / "population.py")]
    process = subprocess.Popen(
        [*command, str(written(tmp_path))], env=environment(), stdout=subprocess.PIPE, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert any("generation 1/2: " in line for line in process.stdout)  # until then
    tree = psutil.Process(process.pid).children(recursive=True)
    for each in [psutil.Process(process.pid), *tree]:
        each.kill()
    psutil.wait_procs(tree)
    process.communicate()
    begun = {path.name for path in (tmp_path / "all").glob("generation-001/*")}
    (tmp_path / "all").rename(tmp_path / "moved")
    moved = written(tmp_path, folder=str(tmp_path / "moved"))
    done = subprocess.run(
        [*command, str(moved)], env=environment(), capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming the population" in done.stdout
    assert begun <= {path.name for path in (tmp_path / "moved").glob("generation-001/*")}
    # A member that is replaced may train a generation twice.
    lineage = json.loads((tmp_path / "moved" / "lineage.json").read_text())
    assert len({(member["name"], member["generation"]) for member in lineage}) == 4
    assert not (tmp_path / "all").exists()


@pytest.mark.slow
def test_a_population_survives_a_failure_of_ray(tmp_path):
    pytest.importorskip("ray")
    plan = written(tmp_path, generations=12)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "population.py"), str(plan)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert any("generation 1/12: " in line for line in process.stdout)  # until then
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.name() == "raylet":
            child.kill()
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert "Ray lost its node" in printed and "resuming the population" in printed, printed
    assert "Traceback" not in printed
    lineage = json.loads((tmp_path / "all" / "lineage.json").read_text())
    assert len({(member["name"], member["generation"]) for member in lineage}) == 24
