"""Every preset composes, is accepted, and builds environments and an agent that play together."""

from pathlib import Path

import hydra
import pytest
import torch
from algorithms import eager, known, small
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from steadyrl.agents.registry import ALGORITHMS
from steadyrl.core.errors import SettingError
from steadyrl.training.run.job import accept
from steadyrl.training.setup import build

CONFIGS = Path(__file__).parent.parent / "configs"
ENVS = sorted(path.stem for path in (CONFIGS / "env").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
LITTLE = ("device=cpu", "threads=1")
# What presets with many switches on are called by.
NAMED = {"rainbow": "dqn"}


def compose(*overrides):
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = hydra.compose("config", list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    del config.hydra
    return config


def accepted(*overrides):
    try:
        return accept(compose(*overrides))
    except SettingError as error:
        if "pip install" in error.reason:
            pytest.skip(str(error))
        raise


def play(job, rows=5):
    """Act and learn for a few rows."""
    with build(job) as (env, agent):
        env.reset()
        actor = agent.actor(env.spec.num_envs, explore=True)
        for _ in range(rows):
            decision = actor.act(env.observation, env.episode_starts)
            step = env.step(decision.env_action.numpy(force=True))
            agent.observe(decision, step)
            agent.update()
        assert step.obs.shape == (env.spec.num_envs, *env.spec.observation_shape)
        assert all(torch.isfinite(w).all() for w in agent.weights().values())


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("agent", ALGORITHMS)
def test_environment(env, agent):
    try:
        job = accepted(*eager(agent), f"env={env}", *LITTLE, *small(agent).small_buffers)
    except SettingError as error:
        # The one thing a pair may be refused for: actions the algorithm cannot choose.
        assert error.field == "agent"
        assert "actions" in error.reason
        return
    play(job)


@pytest.mark.parametrize("agent", ALGORITHMS)
def test_a_network_that_is_chosen_learns(agent):
    chosen = known(
        agent,
        "agent.network.encoder=impala",
        "agent.network.layer_norm=true",
        "agent.network.activation=silu",
    )
    job = accepted(*eager(agent), "env=minatar_breakout", *LITTLE, *small(agent).quick, *chosen)
    play(job, rows=9)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment(experiment):
    name = experiment.rpartition("_")[2]
    agent = NAMED.get(name, name)
    assert agent in ALGORITHMS, "presets are called <env>_<agent>"
    compiles = known(agent, "agent.compile=false")
    job = accepted(f"experiment={experiment}", *LITTLE, *compiles, *small(agent).small_buffers)
    assert job.settings.agent.name == agent
    play(job)
    text = (CONFIGS / "experiment" / f"{experiment}.yaml").read_text()
    assert "# Held against" in text


@pytest.mark.parametrize("env", ENVS)
def test_an_environment_repeats_no_default(env):
    default, own = (
        OmegaConf.to_container(OmegaConf.load(CONFIGS / name))
        for name in ("env_defaults.yaml", f"env/{env}.yaml")
    )
    assert own.keys() <= default.keys()
    assert [key for key, value in own.items() if default[key] == value] == []
    assert "id" in own


def test_there_are_presets():
    assert len(EXPERIMENTS) >= 20
    assert len(ENVS) >= 8
