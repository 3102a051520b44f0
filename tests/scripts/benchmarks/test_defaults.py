"""Default settings are compared by a line for each run; runs that have one are not run again."""

import argparse
import json

import pytest

from scripts.benchmarks import defaults
from scripts.benchmarks.race import Finish
from steadyrl.agents.registry import ALGORITHMS


@pytest.fixture
def ran(monkeypatch):
    """Contestants that only note their name and seed."""
    noted = []

    def contestant(name):
        return lambda seed: noted.append((name, seed)) or Finish(1.5, 10.0 * seed)

    def contestants(arguments, settings, *, nothing_more):
        assert nothing_more and settings.run.total_steps == 2_000
        return {name: contestant(name) for name in (defaults.OURS, defaults.SB3)}

    monkeypatch.setattr(defaults, "contestants", contestants)
    return noted


def compare(data, *words):
    parser = argparse.ArgumentParser()
    defaults.add_parser(parser.add_subparsers())
    args = parser.parse_args(["defaults", *words, "--data", str(data)])
    args.run(args)
    return [json.loads(line) for line in data.read_text().splitlines()]


def test_a_run_has_a_line_and_is_not_run_again(ran, tmp_path):
    words = ("cartpole=2", "--agents", "ppo", "--seeds")
    first = compare(tmp_path / "lines", *words, "2")
    assert [(each["by"], each["seed"]) for each in first] == ran
    assert [each["score"] for each in first] == [0.0, 10.0, 0.0, 10.0]
    assert {(each["environment"], each["chosen_on"]) for each in first} == {("cartpole", False)}
    assert {"commit", "date", "processor", "command"} < first[0].keys()
    del ran[:]
    assert compare(tmp_path / "lines", *words, "3")[:4] == first
    assert ran == [(defaults.OURS, 2), (defaults.SB3, 2)]


def test_environments_that_an_algorithm_cannot_learn_are_left_out(ran, tmp_path, capsys):
    lines = compare(tmp_path / "lines", "pendulum=2", "--seeds", "1")
    assert {each["agent"] for each in lines} == {"ppo"}
    assert "left out: agent=dqn: needs" in capsys.readouterr().out


def test_every_algorithm_and_environment_is_compared():
    parser = argparse.ArgumentParser()
    defaults.add_parser(parser.add_subparsers())
    args = parser.parse_args(["defaults"])
    assert args.agents == [*ALGORITHMS] and len(args.envs) == len(set(args.envs)) >= 20
