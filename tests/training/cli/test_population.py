"""A population is refused before its first member, and its members go on from one another."""

import json
import os
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
    Member,
    ancestors,
    draw_lineage,
    latest_of_each,
    read_members,
    train_generation,
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
def test_what_cannot_be_run_is_refused_in_one_line(tmp_path, capsys, changes, code, words):
    with pytest.raises(SystemExit) as ended:
        population.main([str(written(tmp_path, **changes))])
    printed = capsys.readouterr().err
    assert (ended.value.code, len(printed.splitlines())) == (code, 1)
    for word in words:
        assert word in printed
    assert not (tmp_path / "all").exists()


def test_memory_is_asked_for_by_the_steps_of_all_generations(tmp_path, monkeypatch):
    """A run's replay grows with the generations of one member, however many members there are."""
    monkeypatch.setattr(
        "steadyrl.training.tuning.population.available_bytes", lambda: 2 * 452_500_000
    )
    small = {"overrides": ["agent=dqn", "env=cartpole"], "interval": 10_000, "workers": 2}
    population.read_plan(written(tmp_path, **small, members=1000, generations=3))
    with pytest.raises(MemoryBudgetError, match="2 parallel members need about"):
        population.read_plan(written(tmp_path, **small, members=2, generations=1000))


def test_a_working_directory_that_cannot_be_written_is_none_of_a_population_elsewhere(
    tmp_path, monkeypatch
):
    here, access = tmp_path / "here", os.access
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(os, "access", lambda path, mode: path != here and access(path, mode))
    assert population.read_plan(written(tmp_path)).folder == tmp_path / "all"
    with pytest.raises(StudyError, match="name another place with folder:"):
        population.read_plan(written(tmp_path, folder=None))
    assert not list(here.iterdir())


def test_no_more_members_run_at_once_than_there_are(tmp_path):
    assert population.read_plan(written(tmp_path, workers=50, interval=256.0)).workers == 2


def test_ray_that_is_missing_is_named_with_its_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as ended:
        population.main([str(written(tmp_path))])
    assert ended.value.code == 2
    assert 'pip install -e ".[ray]"' in capsys.readouterr().err


def test_a_line_of_ancestors_leads_to_the_first_generation(tmp_path):
    pytest.importorskip("matplotlib")
    members = [
        Member("a", 1, 1.0, {}, None, "1a"), Member("b", 1, 5.0, {}, None, "1b"),
        Member("a", 2, 6.0, {}, "1b", "2a"), Member("b", 2, 4.0, {}, "1b", "2b"),
    ]  # fmt: skip
    assert [(m.name, m.generation) for m in ancestors(members, members[2])] == [("b", 1), ("a", 2)]
    draw_lineage(members, tmp_path / "lineage.png")
    assert (tmp_path / "lineage.png").stat().st_size > 1000


def test_a_member_that_lived_a_generation_twice_counts_once_as_it_was_last(tmp_path):
    one, other, again = (str(tmp_path / name) for name in ("1a", "1b", "1a-again"))
    lives = [
        Member("a", 1, 9.0, {}, None, one), Member("b", 1, 2.0, {}, None, other),
        Member("a", 1, 3.0, {}, other, again),
    ]  # fmt: skip
    for at, (life, folder) in enumerate(zip(lives, ("z", "y", "x"), strict=True)):
        place = tmp_path / "generation-001" / folder
        place.mkdir(parents=True)
        (place / "member.json").write_text(json.dumps(life.plain(tmp_path)))
        os.utime(place / "member.json", (at, at))
    assert read_members(tmp_path) == lives
    assert {(m.name, m.score) for m in latest_of_each(lives)} == {("a", 3.0), ("b", 2.0)}


class Lived:
    """A run that is over at once."""

    def __init__(self, overrides, place, **_):
        (place / "config.yaml").touch()

    def wait(self):
        return Outcome("finished", 0, 1.0)


def test_a_population_that_was_moved_knows_its_members(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "RunProcess", Lived)
    monkeypatch.setattr(members, "fork_checkpoint", lambda source, target, config: 0)
    there, here = tmp_path / "there", tmp_path / "here"
    first = train_generation(there, "a", 1, None, OWN, {"agent.gamma": 0.9}, 256)
    second = train_generation(there, "b", 2, first.run_dir, OWN, {"agent.gamma": 0.8}, 256)
    assert read_members(there) == [first, second]
    there.rename(here)
    moved = read_members(here)
    assert all(Path(member.run_dir).is_relative_to(here) for member in moved)
    assert ancestors(moved, moved[1]) == moved
    again = train_generation(here, "b", 2, moved[0].run_dir, OWN, {"agent.gamma": 0.8}, 256)
    assert again == moved[1]


@pytest.mark.slow
def test_a_member_goes_on_from_another_with_other_settings(tmp_path):
    slow, fast = {"agent.learning_rate": 5e-4}, {"agent.learning_rate": 1e-3}
    first = train_generation(tmp_path, "a", 1, None, OWN, fast, 256)
    second = train_generation(tmp_path, "b", 2, first.run_dir, OWN, slow, 256)
    again = train_generation(tmp_path, "b", 2, first.run_dir, OWN, slow, 256)
    assert (again, second.parent) == (second, first.run_dir)  # what is over is not done again
    assert {m.run_dir for m in read_members(tmp_path)} == {first.run_dir, second.run_dir}
    saved = saved_below(Path(second.run_dir) / "checkpoints")
    assert verified_metadata(saved[0].path)["config"]["agent"]["learning_rate"] == 5e-4
    summaries = [
        json.loads((Path(m.run_dir) / "summary.json").read_text()) for m in (first, second)
    ]
    assert saved[-1].step >= summaries[0]["steps"] >= 256  # it never began anew
    assert summaries[1]["steps"] >= 512
    with pytest.raises(CheckpointError):
        manifest_of(tmp_path)


@pytest.mark.slow
def test_a_small_population_comes_to_its_end(tmp_path):
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "population.py"), str(written(tmp_path))],
        env=environment(), capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "population: 4/4 generations of members done" in done.stdout
    assert len(json.loads((tmp_path / "all" / "lineage.json").read_text())) == 4


@pytest.mark.slow
def test_a_population_that_was_killed_and_moved_goes_on_where_it_was(tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, str(ROOT / "scripts" / "population.py")]
    process = subprocess.Popen(
        [*command, str(written(tmp_path))], env=environment(), stdout=subprocess.PIPE, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert "1/4 generations" in process.stdout.readline()
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
    assert len(json.loads((tmp_path / "moved" / "lineage.json").read_text())) == 4
    assert not (tmp_path / "all").exists()


@pytest.mark.slow
def test_a_population_outlives_its_ray(tmp_path):
    pytest.importorskip("ray")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "population.py"), str(written(tmp_path))],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    printed = process.stdout.readline()
    assert "1/4 generations" in printed
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.name() == "raylet":
            child.kill()
    printed += process.communicate()[0]
    assert process.returncode == 0, printed
    assert "Ray lost its node" in printed and "resuming the population" in printed
    assert "Traceback" not in printed
    assert len(json.loads((tmp_path / "all" / "lineage.json").read_text())) == 4
