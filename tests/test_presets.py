"""Every preset composes, validates, and builds environments and an agent that train."""

from pathlib import Path

import hydra
import pytest
import torch
from algorithms import eager, known, small
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from steadyrl.agents.networks.settings import fitting
from steadyrl.agents.registry import ALGORITHMS
from steadyrl.core.errors import SettingError
from steadyrl.training.run.job import accept
from steadyrl.training.setup import build

CONFIGS = Path(__file__).parent.parent / "configs"
ENVS = sorted(path.stem for path in (CONFIGS / "env").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
COMMON = ("device=cpu", "threads=1")
# Names of presets that differ from their agent's.
AGENT_OF = {"rainbow": "dqn", "der": "dqn", "drq": "dqn", "cpu": "ppo"}


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


def play(job, timesteps=5):
    """Act and learn for a few timesteps."""
    with build(job) as (env, agent):
        env.reset()
        actor = agent.actor(env.spec.num_envs, explore=True)
        for _ in range(timesteps):
            decision = actor.act(env.observation, env.episode_starts)
            step = env.step(decision.env_action.numpy(force=True))
            agent.observe(decision, step)
            agent.update()
        assert step.obs.shape == (env.spec.num_envs, *env.spec.observation_shape)
        assert all(torch.isfinite(w).all() for w in agent.weights().values())


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("agent", ALGORITHMS)
def test_every_environment_preset_trains_with_every_agent(env, agent):
    try:
        job = accepted(*eager(agent), f"env={env}", *COMMON, *small(agent).small_buffers)
    except SettingError as error:
        # Pairs may be rejected only for an unsupported action space.
        assert error.field == "agent"
        assert "actions" in error.reason
        return
    play(job)


@pytest.mark.parametrize("encoder", fitting((4, 10, 10)))
@pytest.mark.parametrize("agent", ALGORITHMS)
def test_a_configured_network_trains(agent, encoder):
    chosen = known(
        agent,
        f"agent.network.encoder={encoder}",
        "agent.network.layer_norm=true",
        "agent.network.activation=silu",
    )
    job = accepted(*eager(agent), "env=minatar_breakout", *COMMON, *small(agent).quick, *chosen)
    play(job, timesteps=9)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_preset_trains(experiment):
    name = experiment.rpartition("_")[2]
    agent = AGENT_OF.get(name, name)
    assert agent in ALGORITHMS, "presets are called <env>_<agent>"
    compiles = known(agent, "agent.compile=false")
    job = accepted(f"experiment={experiment}", *COMMON, *compiles, *small(agent).small_buffers)
    assert job.settings.agent.name == agent
    play(job)
    text = (CONFIGS / "experiment" / f"{experiment}.yaml").read_text()
    assert "# Held against" in text


@pytest.mark.parametrize("env", ENVS)
def test_environment_presets_repeat_no_default(env):
    default, preset = (
        OmegaConf.to_container(OmegaConf.load(CONFIGS / name))
        for name in ("env_defaults.yaml", f"env/{env}.yaml")
    )
    assert preset.keys() <= default.keys()
    assert [key for key, value in preset.items() if default[key] == value] == []
    assert "id" in preset


def test_presets_are_found():
    assert len(EXPERIMENTS) >= 20
    assert len(ENVS) >= 8
