"""Rows of a comparison: score, P(better), steps to a threshold, speed and memory."""

import shutil

import pytest
from written_runs import write_run

from tests.training.cli.test_compare import atari_runs, compare, summary, two_groups, write_finished


def test_the_table_has_scores_intervals_speed_and_memory(tmp_path, capsys):
    two_groups(tmp_path)
    (fast, slow), err = compare(capsys, tmp_path)
    assert err == ""
    assert (fast["group"], slow["group"]) == ("learning_rate=0.01", "learning_rate=0.001")
    assert (fast["score"], slow["score"]) == (491.5, 246.5)
    assert fast["score_low"] < 490.5 and fast["score_high"] > 492.5
    assert (fast["better"], slow["better"], slow["better_high"]) == (None, 0.0, 0.0)
    # CartPole's own threshold is 475.
    assert (fast["threshold"], fast["solved"], fast["steps"], fast["seconds"]) == (475, 4, 3000, 3)
    assert (slow["solved"], slow["steps"], slow["seconds"]) == (0, None, None)
    assert (fast["steps_per_second"], fast["memory_mb"]) == (1001.5, 503.0)


def test_steps_to_threshold_is_the_median_over_all_seeds(tmp_path, capsys):
    for seed, end in enumerate((300.0, 300.0, 10.0)):
        write_run(tmp_path / str(seed), {100 * (seed + 1): 1.0, 1000 + seed: end}, seed=seed)
    (row,), _ = compare(capsys, tmp_path, "--threshold", 100)
    assert (row["solved"], row["steps"], row["seconds"]) == (2, 1001, pytest.approx(1.001))
    (row,), _ = compare(capsys, tmp_path / "0", tmp_path / "2", "--threshold", 100)
    assert (row["solved"], row["steps"], row["seconds"]) == (1, None, None)


def test_the_median_of_even_many_seeds_is_between_the_middle_two(tmp_path, capsys):
    for seed in range(4):
        write_run(tmp_path / str(seed), {1000 * (seed + 1): 300.0}, seed=seed)
    (row,), _ = compare(capsys, tmp_path, "--threshold", 100)
    assert (row["solved"], row["steps"], row["seconds"]) == (4, 2500, 2.5)


def test_groups_are_compared_within_each_environment(tmp_path, capsys):
    for env, lift in (("CartPole-v1", 1.0), ("Acrobot-v1", -1.0), ("Unknown-v9", 0.0)):
        for agent in ("dqn", "ppo"):
            write_run(tmp_path / f"{env}-{agent}", {10: lift}, env=env, agent=agent)
    rows, _ = compare(capsys, tmp_path, "--by", "agent,env")
    assert [(row["env"], row["group"], row["better"], row["threshold"]) for row in rows] == [
        ("Acrobot-v1", "dqn", None, -100),
        ("Acrobot-v1", "ppo", 0.5, -100),
        ("CartPole-v1", "dqn", None, 475),
        ("CartPole-v1", "ppo", 0.5, 475),
        ("Unknown-v9", "dqn", None, None),
        ("Unknown-v9", "ppo", 0.5, None),
    ]


def test_unscored_and_failed_runs_are_named(tmp_path, capsys):
    write_finished(tmp_path / "good", {10: 1.0})
    summary(write_run(tmp_path / "bad", {10: 2.0}, broken=("{",), seed=1), status="diverged")
    write_run(tmp_path / "killed", {10: 3.0}, seed=2)
    write_run(tmp_path / "young", {}, seed=3)
    (row,), err = compare(capsys, tmp_path)
    assert row["seeds"] == 3
    assert err.splitlines() == [
        "dqn: left out 1 unreadable lines of bad",
        "dqn: bad did not finish: diverged",
        "dqn: killed did not finish: killed",
        f"dqn: {tmp_path / 'young'} is left out: no evaluations and no returns (killed)",
    ]


def test_evaluations_are_not_averaged_with_training_returns(tmp_path, capsys):
    """Of one environment all runs have one measure; without any evaluation, training returns."""
    for seed in range(2):
        write_finished(tmp_path / f"good-{seed}", {10: 500.0 + seed}, seed=seed)
    killed = write_run(tmp_path / "killed", {10: 0.0}, seed=2, rollout_return_mean={10: 7.0})
    metrics = killed / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("eval/return_mean", "ignored"))
    (row,), err = compare(capsys, tmp_path)
    assert (row["seeds"], row["score"]) == (2, 500.5)
    assert err.splitlines() == [
        f"dqn: {killed} is left out: no evaluations, which other runs have (killed)"
    ]
    (row,), err = compare(capsys, killed)
    assert (row["seeds"], row["score"]) == (1, 7.0)
    assert "CartPole-v1: no run has evaluations; scores are returns of training\n" in err


def test_a_failed_run_without_scores_is_named_once(tmp_path, capsys):
    write_finished(tmp_path / "good", {10: 1.0})
    summary(write_run(tmp_path / "bad", {}, seed=1), status="failed")
    _, err = compare(capsys, tmp_path)
    assert err.splitlines() == [
        f"dqn: {tmp_path / 'bad'} is left out: no evaluations and no returns (failed)"
    ]


def test_the_same_run_twice_is_one_seed(tmp_path, capsys):
    for name in "ab":
        write_finished(tmp_path / name, {10: 1.0})
    (row,), err = compare(capsys, tmp_path)
    assert row["seeds"] == 1
    assert err == "dqn: seed 0 twice with the same settings: left out a\n"


def test_atari_scores_are_normalised_by_game_and_averaged_over_games(tmp_path, capsys):
    rows, err = compare(capsys, *atari_runs(tmp_path), "--normalise", "atari")
    assert err == ""
    by = {(row["env"], row["group"]): row for row in rows}
    assert by["ALE/Pong-v5", "half"]["normalised"] == pytest.approx(0.55)
    assert by["ALE/Freeway-v5", "good"]["normalised"] == pytest.approx(1.55)
    pong = by["ALE/Pong-v5", "half"]
    assert pong["score_low"] == pytest.approx(-20.7 + pong["normalised_low"] * 35.3)
    over = by["interquartile mean of 2 games", "half"]
    assert (over["normalised"], over["seeds"], over["score"]) == (pytest.approx(0.55), 4, None)
    assert over["normalised_low"] < 0.55 < over["normalised_high"]
    assert len(rows) == 6
    plain, _ = compare(capsys, *atari_runs(tmp_path / "again"))
    assert {row["normalised"] for row in plain} == {None} and len(plain) == 4


def test_a_mean_over_fewer_games_than_others_says_so(tmp_path, capsys):
    runs = atari_runs(tmp_path)
    for run in tmp_path.glob("half-Freeway-*"):
        shutil.rmtree(run)
    rows, err = compare(capsys, *runs, "--normalise", "atari")
    assert err == "half: the interquartile mean is without Freeway, which others have\n"
    assert {row["group"] for row in rows if row["env"] == "interquartile mean of 1 game"} == {
        "half"
    }


def test_a_mean_over_games_of_unequal_many_runs_says_so(tmp_path, capsys):
    runs = atari_runs(tmp_path)
    shutil.rmtree(tmp_path / "half-Freeway-1")
    _, err = compare(capsys, *runs, "--normalise", "atari")
    assert err == "half: games have 1 to 2 runs, and those of more count for more\n"


def test_a_game_under_two_ids_is_one_game(tmp_path, capsys):
    for at, env in enumerate(("ALE/Pong-v5", "PongNoFrameskip-v4", "ale_py:ALE/Pong-v5")):
        write_finished(tmp_path / str(at), {10: 14.6}, env=env, seed=at)
    write_finished(tmp_path / "other", {10: 29.6}, env="ALE/Freeway-v5")
    assert len(compare(capsys, f"pong={tmp_path}/[012]", "--normalise", "atari")[0]) == 3
    rows, _ = compare(capsys, f"mine={tmp_path}/*", "--normalise", "atari")
    [over] = [row for row in rows if row["score"] is None]
    assert (over["env"], over["seeds"]) == ("interquartile mean of 2 games", 4)
    assert over["normalised"] == pytest.approx(1.0)


def test_a_single_run_has_no_interval(tmp_path, capsys):
    write_finished(tmp_path / "a", {10: 1.0}, env="ALE/Pong-v5")
    write_finished(tmp_path / "b", {10: 2.0}, env="ALE/Pong-v5", rate=0.5)
    one, other = compare(capsys, tmp_path, "--normalise", "atari")[0]
    for row in (one, other):
        assert row["score"] is not None and row["normalised"] is not None
        assert not any(row[key] for key in row if key.endswith(("_low", "_high")))
    assert other["better"] is not None


def test_a_single_game_has_no_mean_over_games(tmp_path, capsys):
    atari_runs(tmp_path)
    rows, _ = compare(capsys, tmp_path / "half-Pong-0", "--normalise", "atari")
    assert [row["env"] for row in rows] == ["ALE/Pong-v5"]
