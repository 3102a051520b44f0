"""Actors on the host equal the network, also after updates."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from ppo_agents import CPU, SPACES, Episodes, act, build, collect, learn

from steadyrl.agents.actors.greedy import GreedyActor
from steadyrl.agents.actors.sampling import SamplingActor
from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.engine.cpu.policy import policy_on_host, q_on_host, value_on_host
from steadyrl.agents.networks.activations import ACTIVATIONS
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.networks.settings import PLAIN
from steadyrl.agents.ppo.advantages import RolloutEvaluator


def both(agent):
    """Return an actor on the host and one on the network's device, with equal noise."""
    module, head = agent._learner.network.module, agent._actor._head
    options = dict(timesteps=16, num_envs=3, device=CPU, seed=5)
    return [SamplingActor(module, head, host, **options) for host in (policy_on_host(module), None)]


@pytest.mark.parametrize(("shape", "shared"), [((4,), None), ((2, 3), True), ((2, 6, 5), False)])
@pytest.mark.parametrize(
    ("activation", "layer_norm"), [("tanh", False), ("relu", False), ("silu", True)]
)
@pytest.mark.parametrize("name", SPACES)
def test_compiled_actions_and_values_equal_the_network(name, activation, layer_norm, shape, shared):
    agent = build(
        action=SPACES[name],
        network=replace(PLAIN, activation=activation, layer_norm=layer_norm),
        hidden=(16, 8),
        shape=shape,
        shared_trunk=shared,
        normalize_obs=True,
        learning_rate=0.1,
    )
    env = Episodes(shape=shape, scale=3.0)
    _, obs = learn(agent, env, env.reset(), 3)  # weights and statistics have changed
    mine, network = both(agent)
    assert not agent._actor.stores_log_prob
    assert not mine.stores_log_prob and network.stores_log_prob
    greedy = agent.actor(3, explore=False)
    head = agent._actor._head
    module = agent._learner.network.module
    on_device = GreedyActor(module.policy_params, None, CPU, lambda p: head.to_env(head.greedy(p)))
    value_of = value_on_host(module)
    episode_starts = np.zeros(3, dtype=bool)
    for _ in range(20):
        one, two = mine.act(obs, episode_starts), network.act(obs, episode_starts)
        torch.testing.assert_close(one.env_action, two.env_action)
        assert one.log_prob is None and two.log_prob is not None
        torch.testing.assert_close(
            greedy.act(obs, episode_starts).env_action,
            on_device.act(obs, episode_starts).env_action,
        )
        seen = torch.from_numpy(obs)
        torch.testing.assert_close(value_of(seen), module(seen)[1].detach())
        obs = env.step().obs


def test_log_probs_and_values_are_filled_in_for_the_whole_rollout():
    agent = build(shape=(4,), normalize_obs=True)
    env = Episodes()
    _, obs = learn(agent, env, env.reset(), 2)
    collect(agent, env, obs, 16)
    rollout = agent._rollout
    rollout.log_prob.fill_(np.nan)
    rollout.value.fill_(np.nan)
    with torch.inference_mode():
        # Chunks of 7 of 48 samples: the last chunk is smaller.
        evaluator = RolloutEvaluator(agent._learner, agent._actor._head, 7, engine_of("direct"))
        evaluator.evaluate(rollout)
    for t in range(16):
        parameters, value = agent._learner.network.module(rollout.obs[t])
        log_prob, _ = agent._actor._head.evaluate(parameters, rollout.action[t])
        torch.testing.assert_close(rollout.log_prob[t], log_prob.detach())
        torch.testing.assert_close(rollout.value[t], value.detach())


@pytest.mark.long
def test_compiled_rollout_evaluation_equals_the_network():
    agent = build(shape=(3,), action=SPACES["box"], normalize_obs=True)
    env = Episodes(shape=(3,))
    _, obs = learn(agent, env, env.reset(), 2)
    collect(agent, env, obs, 16)
    rollout, learner = agent._rollout, agent._learner
    direct, graph = (
        RolloutEvaluator(learner, agent._actor._head, 20, engine_of(mode))
        for mode in ("direct", "compiled")
    )
    sizes, read = [], graph._evaluate_eager

    def looked_at(obs, action):
        sizes.append(len(obs))
        return read(obs, action)

    graph._evaluate_eager = looked_at

    for _ in range(2):  # weights and statistics are read at each call, not at construction
        with torch.inference_mode():
            direct.evaluate(rollout)
            expected = rollout.log_prob.clone(), rollout.value[:-1].clone()
            rollout.log_prob.fill_(np.nan)
            rollout.value.fill_(np.nan)
            graph.evaluate(rollout)
        torch.testing.assert_close((rollout.log_prob, rollout.value[:-1]), expected)
        learner.network.weights.mul_(1.5)
        agent._observations.normaliser.frozen_mean.add_(0.3)
    assert sizes == [8, 8]  # the remaining 16 of 48 samples


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (1, 36, 36)},
        {"shape": (1, 36, 36), "network": replace(PLAIN, encoder="minatar")},
        {"shape": (1, 8, 8), "network": replace(PLAIN, encoder="impala")},
        {"mask": 1},
    ],
)
def test_unsupported_networks_act_on_their_device(changes):
    assert build(**changes)._actor.stores_log_prob


def test_an_actor_resumes_within_a_rollout():
    agent = build()
    (one, _), (other, _) = both(agent), both(agent)
    obs, episode_starts = np.zeros((3, 4), dtype=np.float32), np.zeros(3, dtype=bool)
    for _ in range(22):
        one.act(obs, episode_starts)
    other.load_state_dict(one.state_dict())
    for _ in range(19):
        torch.testing.assert_close(
            one.act(obs, episode_starts).env_action,
            other.act(obs, episode_starts).env_action,
            rtol=0,
            atol=0,
        )


@pytest.mark.parametrize("changes", [{}, {"normalize_obs": True}, {"recurrent__cell": "gru"}])
def test_a_rollout_continued_by_another_engine_is_learned_from_whole(monkeypatch, changes):
    def continued(agent):
        """Begin a second rollout on the host, end it with this agent; return what it learned."""
        first, env = build(**changes), Episodes()
        _, obs = learn(first, env, env.reset(), 1)
        obs = collect(first, env, obs, 7)
        stored = first._actor.stores_log_prob
        pending = act(first, obs)
        agent.load_state_dict(copy.deepcopy(first.state_dict()))
        assert agent._rollout.evaluated == stored
        agent._actor.check_decision(pending)
        step = env.step()
        agent.observe(pending, step)
        collect(agent, env, step.obs, 8)
        metrics = agent.update()
        return dict(zip(metrics.names, metrics.values.tolist(), strict=True))

    expected = continued(build(**changes))
    monkeypatch.setenv("STEADYRL_ENGINE", "eager")
    other = build(**changes)
    assert other._actor.stores_log_prob
    monkeypatch.delenv("STEADYRL_ENGINE")
    assert continued(other) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_behaviour_actor_is_unique_and_checks_num_envs():
    agent = build(3)
    assert agent.actor(3, explore=True) is agent.actor(3, explore=True)
    with pytest.raises(ValueError, match="3 environments, not 4"):
        agent.actor(4, explore=True)
    assert agent.actor(4, explore=False).state_dict() == {}


def test_distributional_heads_have_no_compiled_actor():
    scalar = QNetwork((4,), "float32", 3, (8,), dueling=False)
    spread = QNetwork((4,), "float32", 3, (8,), dueling=False, shape=(5,))
    assert q_on_host(scalar) is not None
    assert q_on_host(spread) is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiled_q_values_equal_the_network(activation):
    options = {"network": replace(PLAIN, activation=activation, layer_norm=True)}
    network = QNetwork((4,), "float32", 3, (16, 8), dueling=False, **options)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    obs = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    values = torch.from_numpy(q_on_host(network)(obs.numpy()))
    torch.testing.assert_close(values, network(obs).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trunk", ["minatar", "mlp"])
def test_compiled_q_values_on_boards_equal_the_network(trunk):
    shape, settings = (3, 10, 10), replace(PLAIN, encoder=trunk)
    network = QNetwork(shape, "uint8", 3, (16, 8), dueling=False, network=settings)
    network.reset_parameters(torch.Generator().manual_seed(0))
    lit = np.random.default_rng(1).random((50, *shape)) < 0.2
    boards = lit.astype(np.uint8) * np.uint8(255)
    values = torch.from_numpy(q_on_host(network)(boards))
    torch.testing.assert_close(values, network(torch.from_numpy(boards)).detach())
