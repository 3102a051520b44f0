"""A package's PPO with a network of its own: it has PPO's extensions, and its policy is loaded."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from opened import job
from torch import nn

from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.dqn.policy import build_network as build_q_network
from steadyrl.agents.networks.actor_critic import ActorCritic, SharedTrunk
from steadyrl.agents.networks.encoders import MLP
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.networks.recurrent import RecurrentActorCritic
from steadyrl.agents.ppo.agent import PPO
from steadyrl.agents.ppo.kl_learning_rate import KLLearningRate
from steadyrl.agents.ppo.policy import build_network
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


def learn(agent, env):
    """Step the environments until the agent has made eight updates."""
    actor = agent.actor(2, explore=True)
    env.reset()
    while agent.updates < 8:
        decision = actor.act(env.observation, env.episode_starts)
        agent.observe(decision, env.step(decision.env_action.numpy(force=True)))
        agent.update()


def test_its_network_is_built_learns_and_is_loaded(tmp_path):
    accepted = small_job(tmp_path)
    with build(accepted) as (env, agent):
        features = agent._learner.network.module.trunk.both[0]
        before = features.projections.clone()
        assert before.std() > 0.5
        learn(agent, env)
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


class OwnTrunk(QNetwork):
    """A Q-network with layers of its own before DQN's."""

    def build_trunk(self, observation_shape, dtype, hidden, network, linear):
        first = nn.Linear(*observation_shape, 6)
        mlp = MLP(6, hidden, network.activation, linear=linear)
        return nn.Sequential(first, nn.Tanh(), mlp), hidden[-1]


class OwnDQN(DQN):
    @staticmethod
    def build_network(settings, spec, device):
        return build_q_network(settings, spec, device, OwnTrunk)


class OwnRecurrent(RecurrentActorCritic):
    """A recurrent actor-critic with such layers."""

    def __init__(self, observation_shape, dtype, head, **options):
        super().__init__(observation_shape, dtype, head, **options | {"shared": True})
        first = nn.Linear(*observation_shape, 6)
        mlp = MLP(6, options["hidden"], options["network"].activation)
        self.trunk = SharedTrunk(nn.Sequential(first, nn.Tanh(), mlp))


class OwnPPO(PPO):
    @staticmethod
    def build_network(settings, spec, head, device):
        return build_network(settings, spec, head, device, OwnRecurrent)


CPU = torch.device("cpu")
SMALL_DQN = ("env.num_envs=2", "agent.replay.capacity=64", "agent.hidden=[8]",
             "agent.learning_starts=16", "agent.batch_size=8")  # fmt: skip
ALL_NOISY = ("agent.noisy.enabled=true", "agent.distribution.kind=c51", "agent.dueling=true")
GRU = ("agent.recurrent.cell=gru", "agent.recurrent.size=8")


@pytest.mark.parametrize(
    ("own", "overrides"),
    [
        (OwnDQN, ("agent=dqn", *SMALL_DQN)),
        (OwnDQN, ("agent=dqn", *SMALL_DQN, *ALL_NOISY)),
        (OwnPPO, ("agent=ppo", *SMALL[1:4], "agent.hidden=[8]", *GRU)),
    ],
    ids=["dqn", "noisy", "gru"],
)
def test_a_trunk_of_ones_own_has_the_options_of_dqn_and_ppo(tmp_path, own, overrides):
    accepted = job(tmp_path, *overrides, "agent.compile=false", quick=False)
    settings = accepted.settings.agent
    with build(accepted) as (env, _):
        agent = own(settings, env.spec, device=CPU, seed=0, total_steps=1000)
        first = "trunk.0.weight" if own is OwnDQN else "trunk.both.0.weight"
        before = agent.weights()[first].clone()
        assert before.shape == (6, 4)
        learn(agent, env)
        assert not torch.equal(agent.weights()[first], before)
        if own is OwnDQN:
            noisy = agent._learner.network.module.noise_size > 0
            assert noisy == settings.noisy.enabled
        obs, starts = env.observation, env.episode_starts
        network, finished = own.policy(settings, env.spec, CPU)
        network.load_state_dict(agent.weights())
        trained = agent.actor(2, explore=False).act(obs, starts).env_action
        assert torch.equal(finished.act(obs, starts).env_action, trained)


def test_a_network_without_a_recurrent_form_is_refused(tmp_path):
    accepted = job(tmp_path, "agent=ppo", *SMALL[1:4], *GRU, quick=False)
    with pytest.raises(SettingError, match=r"recurrent\.cell=gru: must be none"):
        build_network(accepted.settings.agent, accepted.spec, None, CPU, partial(ActorCritic))
