"""Agents with a replay need a loss: expected SARSA on the shared part."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from steadyrl.agents.actors.epsilon_greedy import EpsilonGreedyActor
from steadyrl.agents.actors.greedy import greedy_q_actor
from steadyrl.agents.dqn.policy import build_network
from steadyrl.agents.dqn.q_heads import gather_actions
from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.networks.init import initialise
from steadyrl.agents.replay_agent import ReplayAgent, ReplayParts, init_replay
from steadyrl.envs.types import DiscreteActions, EnvSpec
from tests.agents.dqn.test_agent import CPU, SETTINGS, Chain, Loop, act, run

EPSILON, STATES = 0.2, 11
SARSA = replace(SETTINGS, batch_size=32, learning_starts=50, train_every=2, updates_per_train=1,
                learning_rate=3e-3)  # fmt: skip


def expected_sarsa_loss(network, target, batch):
    """Return ½(Q(s, a) − r − γ E_π Q⁻(s', ·))² of each sample; π is ε-greedy (van Seijen 2009)."""
    q = target(batch.next_obs)
    value = (1 - EPSILON) * q.max(1).values + EPSILON * q.mean(1)
    target_value = batch.reward + batch.discount * value
    error = gather_actions(network(batch.obs), batch.action) - target_value
    return PerSampleLoss(0.5 * error.square(), aux=(error.detach(),))


class ExpectedSarsa(ReplayAgent):
    """Q-learning of the policy that acts, from uniform samples."""

    def __init__(self, envs=1, seed=0, settings=SARSA):
        spec = EnvSpec("Chain", envs, (STATES,), "float32", 1, DiscreteActions(2))
        networks = [initialise(build_network(SETTINGS, spec), seed) for _ in range(2)]
        online, target = (FlatNetwork(network, CPU) for network in networks)
        spec_of_loss = LossSpec(
            loss=expected_sarsa_loss, metrics=(), max_grad_norm=10.0, grad_accumulation=1
        )
        engine = engine_of("direct")
        greedy = greedy_q_actor(networks[0], CPU, engine)
        super().__init__(
            ReplayParts(
                settings=settings,
                actions=2,
                clock=settings.clock(4_000),
                rate=settings.learning_rates(4_000),
                beta=settings.betas(4_000),
                learner=Learner(spec_of_loss, online, engine, frozen=(target,)),
                target=target,
                replay=init_replay(settings, spec, CPU, seed, engine),
                actor=EpsilonGreedyActor(greedy, spec, epsilon=lambda: EPSILON, seed=seed),
                build_greedy=lambda: greedy,
            )
        )

    @classmethod
    def policy(cls, settings, spec, device):
        """Build no finished policy: these tests need none."""
        raise NotImplementedError


def test_it_learns_the_value_of_the_policy_that_acts():
    """Reward 1 a step, γ = 0.9, no termination: 10 everywhere, whatever the actions."""
    agent = ExpectedSarsa()
    run(agent, Loop(1, [10], False), 4_000)
    values = agent._learner.network.module(torch.eye(STATES)[:10]).detach()
    assert values.numpy() == pytest.approx(np.full((10, 2), 10.0), rel=0.02)


@pytest.mark.parametrize("envs", [1, 3])
def test_updates_are_counted_and_begin_where_it_says(envs):
    agent, chain = ExpectedSarsa(envs), Chain(envs, [3, 10], True)
    start = agent.learning_start
    assert start == (52, "replay", "agent.learning_starts=50, train_every=2")
    steps = run(agent, chain, 300)
    assert agent.updates == steps // 2 - 25 and agent.target_updates == steps // 50 - 1
    assert agent.scalars()["memory/replay_fill"] == len(agent.replay) / agent.replay.capacity > 0
    assert agent.nbytes()["replay"] == agent.replay.nbytes
    agent.drop_replay()
    assert not len(agent.replay) and not agent.has_pending_updates
    assert agent.learning_start.reason.startswith("the replay starts empty: ")
    assert agent.learning_start.step == (steps + 50) // 2 * 2 + 2


def test_of_an_agent_on_a_card_the_host_holds_what_the_replay_has_there(monkeypatch):
    agent = ExpectedSarsa()
    assert agent.host_nbytes() == agent.nbytes()
    monkeypatch.setattr(ExpectedSarsa, "device", torch.device("cuda"))
    monkeypatch.setattr(type(agent.replay), "host_nbytes", 7)
    assert agent.host_nbytes() == {"replay": 7}


def test_learning_begins_once_a_transition_of_n_steps_is_complete():
    for steps, updates in ((9, 0), (10, 1)):
        agent = ExpectedSarsa(settings=replace(SARSA, n_step=9, learning_starts=2))
        because = "no sample is complete before, unless an episode ends: agent.n_step=9"
        assert agent.learning_start == (10, "replay", because)
        run(agent, Loop(1, [10], False), steps)
        assert agent.updates == updates


def test_rewards_are_clipped_if_the_settings_say_so():
    stored = []
    for clip_reward in (False, True):
        agent = ExpectedSarsa(settings=replace(SARSA, clip_reward=clip_reward))
        loop = Loop(1, [10], False)
        for _ in range(3):
            decision = act(agent, loop._obs())
            agent.observe(decision, loop.step(rewards=5.0))
        stored.append(float(agent._sampler.sample(beta=1.0).reward.max()))
    assert stored == [5.0, 1.0]


class FollowsTheHead(ExpectedSarsa):
    """Has a target network of the head alone."""

    @property
    def followed(self):
        return self._learner.network.part("advantage")


def test_a_target_network_may_be_of_a_part():
    one, other = FollowsTheHead(), ExpectedSarsa(seed=1)
    one._target = FlatNetwork(copy.deepcopy(one._learner.network.module.advantage), CPU)
    one.load_weights(other.weights())
    head, network = other._learner.network.module.advantage, one._learner.network
    wanted = torch.cat([parameter.flatten() for parameter in head.parameters()])
    assert torch.equal(one._target.weights, wanted) and len(wanted) < len(network.weights)
    with pytest.raises(ValueError, match="QNetwork has no weights in 'critic'"):
        network.part("critic")


def test_a_restored_agent_continues_bitwise():
    one, other, chain = ExpectedSarsa(), ExpectedSarsa(seed=1), Chain(1, [3, 10], True)
    run(one, chain, 201)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for agent, world in ((one, chain), (other, copy.deepcopy(chain))):
        obs = world._obs()
        agent.check_consistency(201, None, obs)
        for _ in range(60):
            decision, step = act(agent, obs), world.step()
            agent.observe(decision, step)
            agent.update()
            obs = step.obs
    assert one.updates == other.updates > 75
    assert torch.equal(one._learner.network.weights, other._learner.network.weights)


def test_an_interrupted_update_is_due_again():
    agent = ExpectedSarsa()
    run(agent, Chain(1, [10], True), 60)
    agent._clock.steps += 2
    agent.stop.request()
    before = agent.updates
    assert agent.update() is None and agent.has_pending_updates and agent.updates == before
    agent.stop.local = agent.stop.confirmed = False
    assert agent.update() is not None and agent.updates == before + 1
    assert not agent.has_pending_updates


def test_restored_states_that_contradict_the_run_are_refused():
    agent, chain = ExpectedSarsa(), Chain(1, [10], True)
    steps = run(agent, chain, 60)
    with pytest.raises(ValueError, match=r"agent\.steps"):
        agent.check_consistency(steps + 1, None, chain._obs())
    with pytest.raises(ValueError, match="replay"):
        agent.check_consistency(steps, None, 1 - chain._obs())


def test_new_weights_are_the_target_networks_too():
    one, other = ExpectedSarsa(), ExpectedSarsa(seed=1)
    one.load_weights(other.weights())
    for network in (one._learner.network, one._target):
        assert torch.equal(network.weights, other._learner.network.weights)
