"""`run_name` and `eval.seed`: what they change and what not; names of runs' directories."""

from pathlib import Path

import pytest
from opened import job

from steadyrl.core.errors import SettingError
from steadyrl.loop import train
from steadyrl.training.run.job import default_path, display_name

SHORT = ("total_steps=400", "eval.every=200", "eval.episodes=3")


@pytest.mark.parametrize(
    "name", ["a/b", "a\\b", "..", ".hidden", "-x", "' '", "'a\tb'", "'\x1b[1m'", "x" * 101]
)
def test_names_that_no_directory_should_have_are_refused(tmp_path, name):
    with pytest.raises(SettingError, match="run_name=") as refused:
        job(tmp_path, f"run_name={name}")
    assert str(refused.value).isprintable()


def test_a_run_is_called_by_its_name_and_two_of_one_name_have_two_directories(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first, second = (job(tmp_path, "run_name=mine", "run_dir=null").directory for _ in range(2))
    assert first != second and first.parent == second.parent
    assert first.name.startswith("mine-") and second.name.startswith("mine-")
    with_seeds = job(tmp_path, "run_name=mine", "run_dir=here").directory
    assert with_seeds == Path("here").resolve()


def test_a_resumed_run_keeps_its_name(tmp_path):
    train(job(tmp_path, *SHORT, "run_name=mine"))
    again = job(tmp_path, f"resume={tmp_path / 'run'}", "run_name=other", quick=False)
    assert again.config["run_name"] == "mine"
    assert "run_name=mine (not other: a continued run keeps its name)" in again.continues
    same = job(tmp_path, f"resume={tmp_path / 'run'}", "run_name=mine", quick=False)
    assert same.continues == ()


def test_eval_seed_chooses_the_episodes_and_nothing_else(tmp_path):
    def scores(folder, *overrides):
        summary = train(job(tmp_path / folder, *SHORT, *overrides)).summary
        return summary.eval_return_mean, summary.weights_sha256

    of_run, weights = scores("null")
    assert scores("same", "eval.seed=0") == (of_run, weights)
    other, same_weights = scores("other", "eval.seed=5")
    assert other != of_run and same_weights == weights


def test_runs_of_several_seeds_are_evaluated_on_the_same_episodes(tmp_path, monkeypatch):
    seeds = []

    def recorded(settings, *, seed):
        seeds.append(seed)
        return evaluator(settings, seed=seed)

    from steadyrl.training import setup

    evaluator = setup.Evaluator
    monkeypatch.setattr(setup, "Evaluator", recorded)
    for seed in (0, 1):
        train(job(tmp_path / str(seed), *SHORT, f"seed={seed}", "eval.seed=7"))
    assert len(seeds) == 2 and len(set(seeds)) == 1


def test_negative_seeds_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"eval\.seed=-1: must be null, or 0 or more"):
        job(tmp_path, "eval.seed=-1")


def test_runs_of_the_same_second_have_different_directories():
    paths = {default_path("CartPole-v1", "dqn", 0) for _ in range(100)}
    assert len(paths) == 100


def test_names_are_safe_for_the_file_system():
    path = default_path("ALE/Pong-v5", "dqn", 7)
    assert path.parts[:3] == ("outputs", "ALE_Pong-v5", "dqn")
    assert "-s7-" in path.name


def test_named_runs_have_directories_of_their_own_that_begin_with_the_name():
    paths = {default_path("CartPole-v1", "dqn", 0, "tuned: γ=0.9") for _ in range(100)}
    assert len(paths) == 100
    assert all(path.parent == Path("outputs/CartPole-v1/dqn") for path in paths)
    assert all(path.name.startswith("tuned__γ_0.9-20") for path in paths)


@pytest.mark.parametrize(
    ("name", "folder", "shown"),
    [
        (None, "2026-s0-1f", "2026-s0-1f"),
        ("mine", "mine-2026-s0-1f", "mine"),
        ("mine", "chosen", "mine"),
        ("mine", "seed-3", "mine-seed-3"),
        ("mine", "agent-ppo__seed-1__job-3", "mine-agent-ppo__seed-1__job-3"),
    ],
)
def test_runs_of_one_sweep_are_shown_with_different_names(name, folder, shown):
    assert display_name(name, Path("outputs") / folder) == shown
