"""A package's PPO with a network of its own: it has PPO's extensions, and its policy is loaded."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from opened import job

from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.dqn.policy import build_network
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.ppo.kl_learning_rate import KLLearningRate
from steadyrl.agents.registry import Sample, build_agent, finished_policy
from steadyrl.agents.rnd.extension import PPORND
from steadyrl.core.errors import SettingError
from steadyrl.loop import train
from steadyrl.training.cli.arguments import read
from steadyrl.training.setup import build

pytestmark = pytest.mark.usefixtures("installed")
AGENT = "agent.name=outside.fourier"
SMALL = (AGENT, "env.num_envs=2", "agent.rollout_steps=16", "agent.minibatches=2",
         "total_steps=96", "eval.every=0", "agent.hidden=[8]")  # fmt: skip


def small_job(tmp_path, *overrides):
    return job(tmp_path, *read([*SMALL, *overrides]).overrides, quick=False)


def test_its_network_is_built_learns_and_is_loaded(tmp_path):
    accepted = small_job(tmp_path)
    with build(accepted) as (env, agent):
        features = agent._learner.network.module.trunk.both[0]
        before = features.projections.clone()
        assert before.std() > 0.5
        actor = agent.actor(2, explore=True)
        env.reset()
        while agent.updates < 8:
            decision = actor.act(env.observation, env.episode_starts)
            agent.observe(decision, env.step(decision.env_action.numpy(force=True)))
            agent.update()
        assert torch.equal(features.projections, before)
        settings, cpu, obs = accepted.settings.agent, torch.device("cpu"), env.observation
        assert "trunk.both.0.projections" in agent.weights()
        greedy = agent.actor(2, explore=False).act(obs, env.episode_starts).env_action
        finished = partial(finished_policy, settings, env.spec, agent.weights(), device=cpu)
        assert torch.equal(finished().act(obs, env.episode_starts).env_action, greedy)
        sampled = finished(sample=Sample(2, 0)).act(obs, env.episode_starts)
        assert sampled.env_action.shape == greedy.shape


def test_it_has_the_extensions_of_ppo(tmp_path):
    on = (
        "agent.rnd.coef=1",
        "agent.adapt_learning_rate=kl",
        "agent.target_kl=0.02",
        "agent.anneal_learning_rate=constant",
    )
    with build(small_job(tmp_path, *on)) as (_, agent):
        assert {type(each) for each in agent._extensions} == {PPORND, KLLearningRate}
    train(small_job(tmp_path, *on))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["updates"] > 0


def test_an_extension_that_an_algorithm_does_not_have_is_refused(tmp_path):
    with build(small_job(tmp_path)) as (env, _):
        spec = env.spec
    own = SimpleNamespace(name="outside.a2c", extensions=("curiosity",))
    with pytest.raises(SettingError, match="has no extension for curiosity"):
        build_agent(own, spec, device=torch.device("cpu"), seed=0, total_steps=10)


def test_images_and_recurrent_cells_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"recurrent\.cell=gru: must be none"):
        small_job(tmp_path, "agent.recurrent.cell=gru")
    accepted = small_job(tmp_path)
    images = replace(accepted.spec, frame_shape=(3, 8, 8), dtype="uint8")
    with pytest.raises(SettingError, match="needs observations that are vectors"):
        accepted.settings.agent.validate_fit(images, 96)


def test_layers_of_a_finished_policy_that_behave_otherwise_in_training_do_not(
    tmp_path, monkeypatch
):
    from outside import fourier

    modes = []
    forward = fourier.FourierFeatures.forward
    monkeypatch.setattr(
        fourier.FourierFeatures,
        "forward",
        lambda self, x: (modes.append(self.training), forward(self, x))[1],
    )
    accepted = small_job(tmp_path)
    with build(accepted) as (env, agent):
        env.reset()
        policy = finished_policy(
            accepted.settings.agent, env.spec, agent.weights(), device=torch.device("cpu")
        )
        modes.clear()
        policy.act(env.observation, env.episode_starts)
    assert set(modes) == {False}


def test_dqn_takes_another_network_likewise(tmp_path):
    class Wider(QNetwork):
        pass

    class WiderDQN(DQN):
        @staticmethod
        def build_network(settings, spec, device):
            wider = build_network(settings, spec, device)
            wider.__class__ = Wider
            return wider

    small = ("env.num_envs=2", "agent.replay.capacity=64", "agent.hidden=[8]")
    accepted = job(tmp_path, "agent=dqn", *small, quick=False)
    settings, cpu = accepted.settings.agent, torch.device("cpu")
    agent = WiderDQN(settings, accepted.spec, device=cpu, seed=0, total_steps=100)
    assert {type(network.module) for network in (agent._learner.network, agent._target)} == {Wider}
    assert type(WiderDQN.policy(settings, accepted.spec, cpu)[0]) is Wider
    sampling = WiderDQN.sampling_policy(settings, accepted.spec, cpu, num_envs=2, seed=0)
    assert type(sampling[0]) is Wider
