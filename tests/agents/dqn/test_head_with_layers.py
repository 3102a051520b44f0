"""A head that brings its own layers and noise: IQN (Dabney et al. 2018b), in this file only."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from changed import changed
from ppo_agents import Episodes, collect
from torch import nn

from steadyrl.agents.actors.epsilon_greedy import EpsilonGreedyActor
from steadyrl.agents.dqn import build as building
from steadyrl.agents.dqn import policy
from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.dqn.q_heads import QHead
from steadyrl.agents.engine.cpu.policy import policy_in_machine_code
from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.envs.types import DiscreteActions, EnvSpec
from tests.agents.dqn.test_agent import CPU, SETTINGS
from tests.agents.learner.test_learner import as_traced, replay_batch

COSINES, QUANTILES = 6, 5
SPEC = EnvSpec("Synthetic", 3, (4,), "float32", 1, DiscreteActions(3))


class IQNetwork(QNetwork):
    """Outputs [B, A, K, 2]: the returns at K quantile fractions, and the fractions."""

    def __init__(self, shape, dtype, actions, hidden, dueling, head_shape, **others):
        super().__init__(shape, dtype, actions, hidden, False, **others)
        self.embedding = nn.Linear(COSINES, hidden[-1])

    @property
    def noise_size(self):
        return QUANTILES

    def forward(self, obs, noise=None):
        if noise is None:
            fractions = (torch.arange(QUANTILES, device=obs.device) + 0.5) / QUANTILES
        else:  # uniform, because the noise is sign(ε) √|ε|
            fractions = 0.5 + 0.5 * torch.erf(noise * noise.abs() / math.sqrt(2))
        angles = math.pi * torch.arange(COSINES, device=obs.device) * fractions.unsqueeze(1)
        embedded = F.relu(F.linear(angles.cos(), self.embedding.weight, self.embedding.bias))
        features = self.trunk(obs).unsqueeze(1) * embedded  # [B, K, F]
        returns = self.advantage(features).transpose(1, 2)  # [B, A, K]
        return torch.stack((returns, fractions.expand_as(returns)), -1)


class IQNHead(QHead):
    """Quantile regression at sampled fractions."""

    shape = (QUANTILES, 2)
    network = IQNetwork

    def atoms_and_probs(self, outputs):
        return outputs[..., 0], None

    def loss(self, prediction, targets, probs):
        returns, fractions = prediction.unbind(-1)
        error = targets.unsqueeze(1) - returns.unsqueeze(2)  # [B, K, M]
        huber = F.smooth_l1_loss(error, torch.zeros_like(error), reduction="none")
        each = (fractions.unsqueeze(2) - (error.detach() < 0).float()).abs() * huber
        loss = each.mean(2).sum(1)
        return loss, loss.detach()


class Goals(Extension):
    """Two extensions' fields lie in one batch."""

    def __init__(self, name, number):
        self._name, self._number, self.seen = name, number, []

    def replay_fields(self, batch):
        return {self._name: batch.reward * 0 + self._number}

    def loss_spec(self, spec):
        plain = spec.loss

        def loss(online, target, batch, noise):
            self.seen.append(batch)
            return plain(online, target, batch, noise)

        return changed(spec, loss=loss)


@pytest.fixture
def iqn(monkeypatch):
    for module in (building, policy):
        monkeypatch.setattr(module, "build_q_head", lambda *_: IQNHead())


def agent_of(**changes):
    extensions = changes.pop("extensions", ())
    settings = changed(SETTINGS, learning_starts=0, **changes)
    return DQN(settings, SPEC, device=CPU, seed=0, total_steps=10_000, extensions=extensions)


def test_a_head_brings_its_layers(iqn):
    agent, env = agent_of(), Episodes()
    network = agent._learner.network.module
    assert type(network) is IQNetwork and "embedding.weight" in agent.weights()
    assert not network.is_noisy and isinstance(agent._actor, EpsilonGreedyActor)
    assert policy_in_machine_code(network) is None and agent._fused_rollout is None
    assert (network.embedding.weight.abs() <= 1 / math.sqrt(COSINES)).all()
    before, obs = agent._learner.network.weights.clone(), env.reset()
    for _ in range(20):
        obs = collect(agent, env, obs, 1)
        agent.update()
    moved = agent._learner.network.views(agent._learner.network.weights != before)
    assert agent.updates > 5 and all(parts.any() for parts in moved.values())
    greedy = agent.actor(3, explore=False).act(obs, np.zeros(3, bool)).env_action
    with torch.no_grad():
        assert torch.equal(greedy, network(torch.from_numpy(obs))[..., 0].mean(-1).argmax(1))


def test_its_noise_is_a_function_of_the_update(iqn):
    (noise,) = agent_of()._extensions[0].loss_scalars()
    (again,) = agent_of()._extensions[0].loss_scalars()
    assert noise.shape == (3, QUANTILES) and torch.equal(noise, again)
    with torch.no_grad():
        outputs = agent_of()._learner.network.module(torch.zeros(2, 4), noise[0])
    fractions = outputs[0, 0, :, 1]
    assert ((fractions > 0) & (fractions < 1)).all() and len(fractions.unique()) == QUANTILES


def test_its_graph_learns_the_same(iqn):
    found = []
    for mode in ("direct", "compiled"):
        online, target = (building.init_network(SETTINGS, SPEC, CPU, seed) for seed in (0, 1))
        made = Learner(building.build_loss_spec(SETTINGS), online, mode, frozen=(target,))
        made = made if mode == "direct" else as_traced(made)
        for i in range(10):
            noise = torch.randn(3, QUANTILES, generator=torch.Generator().manual_seed(i))
            made.step(replay_batch(8, i), 1e-3, noise)
        found.append(online.weights)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_extensions_add_named_fields_to_replay_batches(iqn):
    goals = Goals("goal", 1.0), Goals("distance", 2.0)
    agent, env = agent_of(extensions=goals), Episodes()
    collect(agent, env, env.reset(), 8)
    agent.update()
    (batch, *others), _ = (goal.seen for goal in goals)
    assert batch._fields[-3:] == ("index", "goal", "distance")
    assert batch.goal.tolist() == [1.0] * 8 and batch.distance.tolist() == [2.0] * 8
    assert {type(other) for other in others} <= {type(batch)}, "one type for all batches"
