"""A policy that evaluations chose is scored on episodes that they did not play."""

import json
from contextlib import closing
from dataclasses import replace

import pytest
import warm
from opened import job

from steadyrl.envs.backends import single_env
from steadyrl.training.cli.evaluate import main
from steadyrl.training.config.seeds import derive_seeds
from steadyrl.training.evaluation import fresh_episodes
from steadyrl.training.evaluation.evaluator import Evaluator
from steadyrl.training.evaluation.fresh_episodes import fresh_seed

# All policies are equally good, and 150 of them are evaluated on the same 20 episodes.
LOTTERY = (
    "env.id=lottery_env:Lottery-v0",
    "env.backend=sync",
    "total_steps=3000",
    "agent.learning_rate=1e-1",
    "agent.train_every=4",
    "agent.learning_starts=32",
    "eval.every=20",
    "eval.episodes=20",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory, summary, _ = warm.run(tmp_path_factory.mktemp("lottery"), *LOTTERY)
    return directory, summary


@pytest.fixture
def evaluate(capsys):
    """Return a function that evaluates and returns the JSON it prints."""

    def play(*arguments):
        main([*map(str, arguments), "--env", LOTTERY[0].removeprefix("env."), "--json"])
        return json.loads(capsys.readouterr().out)

    return play


@pytest.mark.long
def test_the_score_on_the_choosing_episodes_is_too_high_and_on_fresh_ones_right(run, evaluate):
    directory, summary = run
    biased = evaluate(directory, "--best", "--seed", 0)
    assert biased["return_mean"] == summary["best_eval_return_mean"]
    assert evaluate(directory, "--best")["return_mean"] < biased["return_mean"]
    assert biased["return_mean"] > 0.3  # every policy's true value is 0
    fresh = evaluate(directory, "--best", "--episodes", 400)
    assert abs(fresh["return_mean"]) < 0.2  # four standard errors


def test_the_last_policy_plays_the_episodes_of_training(run, evaluate):
    directory, summary = run
    found = evaluate(directory)
    assert found["return_mean"] == summary["eval_return_mean"]
    assert (found["seed"], found["chosen_on_seed"]) == (0, None)


def test_the_best_policy_is_known_by_its_files_not_by_its_folders_name(run, evaluate, tmp_path):
    directory, _ = run
    (tmp_path / "mine").symlink_to(directory / "policy-best")
    best, renamed = evaluate(directory, "--best"), evaluate(tmp_path / "mine")
    assert renamed.pop("policy") != best.pop("policy") and renamed == best
    assert evaluate(directory, "--best", "--seed", best["seed"])["returns"] == best["returns"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "(fresh: chosen on those of seed 0), greedy"),
        (["--seed=0"], "seed 0 (chosen on these: too high a score), greedy"),
    ],
)
def test_the_output_names_the_seeds(run, capsys, options, said):
    main([str(run[0]), "--best", *options, "--env", LOTTERY[0].removeprefix("env.")])
    assert said in capsys.readouterr().out


def seeds_played(settings, seed, monkeypatch, n=1):
    """Return the reset seeds of an evaluation, as the environments get them."""
    found = []

    def recorded(*where):
        found.append(single_env_seed(*where))
        return found[-1]

    single_env_seed = single_env.episode_seed
    monkeypatch.setattr(single_env, "episode_seed", recorded)
    evaluation = derive_seeds(seed).evaluation
    with closing(Evaluator(settings, seed=evaluation)) as evaluator:
        env = evaluator.env
        env.reset()
        for _ in range(2 * settings.eval.episodes):
            env.step(env.observation[:, 0].astype("int64") * 0)
    monkeypatch.undo()
    return set(found)


def test_fresh_episodes_have_no_seed_in_common_with_those_of_training(tmp_path, monkeypatch):
    training = job(tmp_path, *LOTTERY).settings.run
    scoring = replace(training, eval=replace(training.eval, episodes=50, num_envs=7))
    fresh = fresh_seed(training, scoring)
    chosen_on = seeds_played(training, training.seed, monkeypatch)
    played = seeds_played(scoring, fresh, monkeypatch)
    assert len(chosen_on) >= 20 and len(played) >= 50
    assert not chosen_on & played
    assert fresh == fresh_seed(training, scoring)
    assert fresh != fresh_seed(replace(training, seed=1), scoring)


def test_episodes_of_eval_seed_are_not_fresh_either(tmp_path, monkeypatch):
    training = job(tmp_path, *LOTTERY, "eval.seed=9").settings.run
    fresh = fresh_seed(training, training)
    assert fresh == fresh_seed(replace(training, seed=4), training)
    chosen_on = seeds_played(training, 9, monkeypatch)
    assert not chosen_on & seeds_played(training, fresh, monkeypatch)


def test_a_seed_whose_episodes_meet_those_of_training_is_passed_over(tmp_path, monkeypatch):
    training = job(tmp_path, *LOTTERY).settings.run
    first = fresh_seed(training, training)
    meeting = derive_seeds(first).evaluation

    def colliding(seed, env, episode):
        return 7 if seed in (meeting, derive_seeds(0).evaluation) else seed

    monkeypatch.setattr(fresh_episodes, "episode_seed", colliding)
    assert fresh_seed(training, training) != first
