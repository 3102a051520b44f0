"""Every preset fulfils the contract of VectorEnv, on every backend that runs it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml

from steadyrl.envs.factory import build_env, probe
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import BoxActions, DiscreteActions

CONFIGS = Path(__file__).parents[3] / "configs" / "env"
MODULES = {"box2d": "Box2D", "mujoco": "mujoco", "minatar": "minatar", "atari": "ale_py"}
# Presets that run on several backends here; for the others one is enough.
BACKENDS = {
    "cartpole": ("sync", "async", "kernel", "batch"),
    "frozenlake": ("sync", "async", "kernel"),
    "pendulum": ("sync", "async", "kernel"),
    "lunarlander": ("sync", "async"),
    "hopper": ("sync", "async"),
    "minatar_seaquest": ("sync", "async", "kernel"),
    "atari": ("ale",),
}


def preset(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    for extra, module in MODULES.items():
        if f"the extra {extra}" in text and find_spec(module) is None:
            pytest.skip(f"needs the extra {extra}")
    defaults = yaml.safe_load((CONFIGS.parent / "env_defaults.yaml").read_text())
    return EnvSettings(**defaults | yaml.safe_load(text))


def cases():
    for path in sorted(CONFIGS.glob("*.yaml")):
        for backend in BACKENDS.get(path.stem, ("sync",)):
            yield path.stem, backend


def sample_action(spec, rng):
    if isinstance(spec.action, BoxActions):
        return rng.uniform(spec.action.low, spec.action.high, (spec.num_envs, len(spec.action.low)))
    assert isinstance(spec.action, DiscreteActions)
    return rng.integers(0, spec.action.n, spec.num_envs)


def play(config, seed, timesteps):
    """Play randomly; check every step and return copies of all."""
    rng = np.random.default_rng(seed)
    steps = []
    with build_env(config, seed=seed, num_envs=2) as env:
        spec = env.spec
        obs = env.reset()
        assert obs.shape == (2, *spec.observation_shape)
        assert env.episode_starts.tolist() == [True, True]
        ended = np.zeros(2, bool)
        for _ in range(timesteps):
            before, shown = obs, obs.copy()
            env.send(sample_action(spec, rng))
            step = env.receive()
            obs = step.obs
            np.testing.assert_array_equal(before, shown)
            np.testing.assert_array_equal(env.observation, obs)
            np.testing.assert_array_equal(env.episode_starts, ~step.valid)
            assert obs.shape == shown.shape
            assert obs.dtype == spec.dtype
            assert step.reward.dtype == np.float32
            assert {a.dtype for a in step[2:5]} == {np.dtype(bool)}
            assert not (ended & step.valid).any()
            assert not (~step.valid & (step.terminated | step.truncated)).any()
            assert (step.reward[~step.valid] == 0).all()
            ended = step.terminated | step.truncated
            steps.append([a.copy() for a in step[:5]])
    return steps


@pytest.mark.parametrize(("name", "backend"), list(cases()))
def test_presets_fulfil_the_step_contract(name, backend):
    config = replace(preset(name), backend=backend)
    timesteps = 30 if name == "carracing" else 150
    first, again, other = (
        play(config, 3, timesteps),
        play(config, 3, timesteps),
        play(config, 4, timesteps),
    )
    for one, two in zip(first, again, strict=True):
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)
    assert any((a[0] != b[0]).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*.yaml"))])
def test_probing_presets_returns_the_spec_of_the_environment(name):
    config = preset(name)
    spec = probe(config)
    assert (spec.num_envs, spec.frame_stack) == (config.num_envs, config.frame_stack)
    with build_env(config, seed=0, num_envs=1) as env:
        assert replace(spec, num_envs=1) == env.spec


@pytest.mark.parametrize("backend", ["sync", "async", "kernel"])
def test_one_hot_observations_are_known_as_such(backend):
    """In a spec that is probed as in one that is built, of every backend."""
    config = replace(preset("frozenlake"), backend=backend)
    assert probe(config).one_hot
    with build_env(config, seed=0, num_envs=2) as env:
        assert env.spec.one_hot


def test_a_random_breakout_player_scores_as_published():
    config = preset("minatar_breakout")
    returns, rng = [], np.random.default_rng(0)
    with build_env(config, seed=0, num_envs=4) as env:
        env.reset()
        while len(returns) < 1000:
            step = env.step(sample_action(env.spec, rng))
            returns += [episode.return_ for episode in step.episodes]
    assert np.mean(returns[:1000]) == pytest.approx(0.5, abs=0.05)
