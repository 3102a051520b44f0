"""Hooks of extensions get what their docstrings say."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from changed import changed
from ppo_agents import CPU, SETTINGS, SPACES, Episodes, build, collect, extension
from torch import nn

from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.loss_spec import PerSampleLoss
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.ppo.agent import PPO
from steadyrl.agents.ppo.policy import build_network
from steadyrl.buffers.rollout.buffer import SampleField
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import EnvSpec


class Recorder(Extension):
    """Keep what `after_targets` gets."""

    def after_targets(self, next_obs):
        """Copy it, as it may lie in a buffer of the agent."""
        self.next_obs = next_obs.clone()


@pytest.mark.parametrize("normalised", [False, True])
def test_the_last_observation_continues_those_of_the_rollout(normalised):
    agent, env = build(normalize_obs=normalised), Episodes(scale=3.0)
    agent._extensions = (recorder := Recorder(),)
    obs = collect(agent, env, env.reset(), 16)
    normaliser = agent._learner.network.module.normaliser
    with torch.no_grad():
        stored = normaliser(torch.from_numpy(obs)) if normalised else torch.from_numpy(obs)
    agent.update()
    assert torch.equal(recorder.next_obs, stored)
    assert not recorder.next_obs.is_inference(), "it may enter a loss"
    obs = collect(agent, env, obs, 16)
    agent.update()
    assert torch.equal(recorder.next_obs, torch.from_numpy(obs)), "later rollouts are raw"


def test_rnd_reads_raw_observations_only():
    agent, env = build(normalize_obs=True, rnd__coef=1.0), Episodes(scale=3.0)
    rnd = extension(agent)._rnd
    obs = collect(agent, env, env.reset(), 16)
    agent.update()
    assert not rnd._outputs.last.any(), "the first rollout has normalised ones"
    obs = collect(agent, env, obs, 16)
    agent.update()
    assert torch.equal(rnd._outputs.last, torch.from_numpy(obs))


class Predicting(ActorCritic):
    """An actor-critic that predicts the next observation where it gets actions, too."""

    def __init__(self, observation_shape, *arguments, **options):
        super().__init__(observation_shape, *arguments, **options)
        self.prediction = nn.Linear(observation_shape[0] + 1, observation_shape[0])

    def reset_parameters(self, generator, init="auto"):
        super().reset_parameters(generator, init)
        for weights in self.prediction.parameters():
            nn.init.normal_(weights, generator=generator)

    def forward(self, obs, action=None):
        outputs = super().forward(obs)
        if action is None:
            return outputs
        return *outputs, self.prediction(torch.cat((obs, action.unsqueeze(1).float()), 1))


def predicting_loss(network, batch, *scalars, loss, seen):
    *outputs, predicted = network(batch.obs, batch.action)
    losses = loss(lambda _: outputs, batch, *scalars)
    error = (predicted - batch.next_obs).square().mean(1)
    seen.append(batch)
    return PerSampleLoss(losses.loss + error, (*losses.metrics, error.detach()))


class Prediction(Extension):
    """A loss of the predicted next observations."""

    def __init__(self, spec):
        self.shape, self.seen = spec.observation_shape, []

    def rollout_fields(self):
        return {"next_obs": SampleField(self.shape, torch.float32)}

    def attach(self, parts):
        self.rollout = parts.rollout

    def loss_spec(self, spec):
        loss = partial(predicting_loss, loss=spec.loss, seen=self.seen)
        return replace(spec, loss=loss, metrics=(*spec.metrics, "train/prediction_loss"))

    def after_targets(self, next_obs):
        field = self.rollout.fields["next_obs"]
        field[:-1], field[-1] = self.rollout.obs[1:], next_obs


class PredictingPPO(PPO):
    """PPO with this network."""

    @staticmethod
    def build_network(settings, spec, head, device):
        return build_network(settings, spec, head, device, Predicting)


def test_a_network_of_its_own_is_not_replaced_by_a_recurrent_one():
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES["discrete"])
    recurrent = replace(SETTINGS.recurrent, cell="gru")
    with pytest.raises(SettingError, match=r"recurrent\.cell=gru: must be none: this network has"):
        PredictingPPO(
            changed(SETTINGS, recurrent=recurrent), spec, device=CPU, seed=0, total_steps=10_000
        )


@pytest.mark.parametrize("normalised", [False, True])
def test_a_loss_may_read_a_further_output_and_next_observations(normalised):
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES["discrete"])
    settings, own = changed(SETTINGS, normalize_obs=normalised), Prediction(spec)
    common = {"device": CPU, "seed": 0, "total_steps": 10_000}
    agent = PredictingPPO(settings, spec, **common, extensions=[own])
    env, weights = Episodes(), agent._learner.network.module.prediction.weight
    obs = env.reset()
    for first in (True, False):
        before = weights.clone()
        obs = collect(agent, env, obs, 16)
        rollout = agent._rollout
        successors, valid = torch.cat((rollout.obs[1:], torch.from_numpy(obs)[None])), rollout.valid
        if first and normalised:
            with torch.no_grad():
                successors[-1] = agent._learner.network.module.normaliser(successors[-1])
        expected = {
            tuple(a.tolist()): b for a, b in zip(rollout.obs[valid], successors[valid], strict=True)
        }
        own.seen.clear()
        agent.update()
        assert sum(len(batch.obs) for batch in own.seen) == 2 * len(expected)
        for batch in own.seen:
            for seen, after in zip(batch.obs, batch.next_obs, strict=True):
                assert torch.equal(after, expected[tuple(seen.tolist())])
        assert not torch.equal(weights, before)
