"""`env.info_metrics`: numbers of `info` at episode ends, on every backend."""

import json
import logging
import math
from importlib.util import find_spec

import numpy as np
import pytest
from opened import job
from toy_environments import settings

from steadyrl.core.errors import SettingError
from steadyrl.envs.encoding.statistics import read_info, read_infos
from steadyrl.envs.factory import build_env
from steadyrl.loop import train


def played(env, timesteps):
    """Return the episodes that end within some timesteps of random actions."""
    with env:
        env.reset()
        n, random = env.spec.num_envs, np.random.default_rng(0)
        steps = [env.step(random.integers(0, env.spec.action.n, n)) for _ in range(timesteps)]
    return [episode for step in steps for episode in step.episodes]


@pytest.mark.parametrize("backend", ["sync", "async", "batch"])
def test_episodes_have_the_info_of_their_last_step(backend):
    names = ("odd", "steps")
    config = settings(num_envs=3, backend=backend, info_metrics=names)
    episodes = played(build_env(config, seed=3), 20)
    assert len({episode.length for episode in episodes}) > 1 and len(episodes) > 9
    for episode in episodes:
        assert episode.info == {"odd": episode.length % 2, "steps": episode.length}


def test_a_run_logs_means_of_info_metrics(tmp_path):
    overrides = ["env.id=toy_environments:Counter-v0", "env.info_metrics=[odd]", "env.num_envs=2"]
    train(job(tmp_path, *overrides, "eval.every=0", "total_steps=1000"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    # Seeds give episodes 1 to 4 steps; about half of 100 are odd.
    assert len(lines) == 2
    assert all(0.2 < json.loads(line)["rollout/info/odd"] < 0.8 for line in lines)


def test_info_of_ale_is_read():
    if find_spec("ale_py") is None:
        pytest.skip("needs the extra atari")
    kwargs = {"max_num_frames_per_episode": 100, "episodic_life": True}
    config = settings("ALE/Pong-v5", backend="ale", kwargs=kwargs, info_metrics=("lives",))
    (first, *_) = played(build_env(config, seed=0), 40)
    assert first.info == {"lives": 0}


def test_info_metrics_are_off_by_default_and_in_evaluation():
    episodes = played(build_env(settings(num_envs=2), seed=0), 9)
    assert episodes and all(episode.info == {} for episode in episodes)
    config = settings(info_metrics=("steps",))
    assert config.for_evaluation().info_metrics == ()


@pytest.mark.parametrize("backend", ["sync", "async", "batch"])
def test_a_missing_info_key_is_warned_of_once_with_existing_keys(backend, caplog):
    config = settings(num_envs=2, backend=backend, info_metrics=("is_success", "steps"))
    with caplog.at_level(logging.WARNING, "steadyrl"):
        episodes = played(build_env(config, seed=0), 12)
    assert {tuple(episode.info) for episode in episodes} == {("steps",)}
    (message,) = [text for text in caplog.messages if "is_success" in text]
    assert (
        "its info has no is_success at an episode's end: it has" in message and "steps" in message
    )


class Broken:
    def __float__(self):
        raise RuntimeError("not me")


def test_non_numeric_info_values_are_left_out():
    info = {"text": "x", "none": None, "list": [1, 2], "flag": np.bool_(True), "deep": {"a": 1}}
    info |= {"huge": 10**400, "broken": Broken(), "one": np.array([4.0])}
    values = np.zeros(8, np.float32)
    read_info(info, list(info), values, lambda _: None)
    finite = {name: value for name, value in zip(info, values, strict=True) if np.isfinite(value)}
    assert finite == {"flag": 1, "one": 4}
    batch = np.zeros((2, 3), np.float32)
    ages = np.array([None, 3.0], object)
    infos = {"a": np.array([1, 2]), "_a": np.array([False, True]), "b": ["x", "y"], "c": ages}
    read_infos(infos, ["a", "b", "c"], batch, lambda _: None)
    np.testing.assert_array_equal(batch, [[np.nan] * 3, [2, np.nan, 3]])
    columns = {"a": np.array([[1], [2]]), "b": np.zeros((2, 3)), "c": 5}  # of torch, often
    read_infos(columns, ["a", "b", "c"], batch, lambda _: None)
    np.testing.assert_array_equal(batch, [[1, np.nan, 5], [2, np.nan, 5]])


def test_values_that_are_no_numbers_are_warned_of():
    info = {"text": "x", "none": None, "nan": math.nan, "list": [1, 2], "deep": {}, "number": 1}
    said: list[str] = []
    read_info(info, list(info), np.zeros(6, np.float32), said.append)
    named = {"text": "a str", "list": "a list", "deep": "a dict"}
    ending = "not a number"
    assert said == [f"{k} in its info is not logged: it is {v}, {ending}" for k, v in named.items()]
    said.clear()
    infos = {"text": ["x", "y"], "number": np.zeros(2), "none": None, "pairs": np.zeros((2, 2))}
    read_infos(infos, list(infos), np.zeros((2, 4), np.float32), said.append)
    assert [message.split()[0] for message in said] == ["text", "pairs"]


@pytest.mark.parametrize("names", [("a", "a"), ("",)])
def test_duplicate_and_empty_names_are_rejected(names):
    with pytest.raises(SettingError, match="must be different names"):
        settings(info_metrics=names)
