"""PopArt: advantages, normalised targets and preserved values, against loops."""

import copy
import math

import numpy as np
import pytest
import torch
from forked_ranks import together
from ppo_agents import Episodes, act, build, collect, learn
from torch import nn

from steadyrl.agents.learner.comm import SINGLE_PROCESS
from steadyrl.agents.networks.normalizers import POPART_DECAY, PopArt
from steadyrl.agents.ppo.popart import compute_advantages_popart
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.envs.types import Step
from tests.agents.learner.test_learner import as_traced
from tests.agents.ppo.test_ranks import ENVS, one_rank, random_timesteps, snapshots

STEPS, GAMMA, LAMBDA = 12, 0.9, 0.8


def filled(random, popart):
    """Return a random rollout with invalid timesteps, its normalised values, values and flags."""
    made = RolloutBuffer(
        steps=STEPS, num_envs=ENVS, observation_shape=(2,), observation_dtype=torch.float32,
        action_shape=(), action_dtype=torch.int64, device=torch.device("cpu"),
    )  # fmt: skip
    mean, std = popart
    normalised = random.normal(size=(STEPS + 1, ENVS)).astype(np.float32)
    flags = np.zeros((3, STEPS, ENVS), bool)
    over = np.zeros(ENVS, bool)
    for t in range(STEPS):
        valid = ~over
        ends, cuts = (random.random((2, ENVS)) < 0.2) & valid
        over = ends | cuts
        flags[:, t] = ends, cuts, valid
        reward = (random.normal(50, 20, ENVS) * valid).astype(np.float32)
        zeros = torch.zeros(ENVS)
        made.add(
            torch.zeros(ENVS, 2), zeros.long(), zeros, torch.from_numpy(normalised[t]), reward,
            ends, cuts, valid,
        )  # fmt: skip
    return made, normalised, normalised.astype(np.float64) * std + mean, flags


def advantages(reward, value, flags):
    """GAE, one timestep after the other, backwards."""
    ended, known = flags[0] | flags[1], np.zeros((STEPS, ENVS))
    for env in range(ENVS):
        following = 0.0
        for t in reversed(range(STEPS)):
            after = 0.0 if flags[0, t, env] else GAMMA * value[t + 1, env]
            delta = reward[t, env] + after - value[t, env]
            following = delta + (0.0 if ended[t, env] else GAMMA * LAMBDA * following)
            known[t, env] = following
    return known


def test_popart_advantages_and_normalised_targets_equal_loops():
    random, popart, head = np.random.default_rng(0), PopArt(), nn.Linear(4, 1)
    popart.reset_parameters()
    features = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    history, mean, std = [], 0.0, 1.0
    for _ in range(4):
        rollout, normalised, value, flags = filled(random, (mean, std))
        before = head(features).detach().double() * std + mean
        compute_advantages_popart(
            rollout,
            torch.from_numpy(normalised[-1]),
            SINGLE_PROCESS,
            head=head,
            popart=popart,
            gamma=GAMMA,
            gae_lambda=LAMBDA,
        )
        truth = advantages(rollout.reward.double().numpy(), value, flags)
        np.testing.assert_allclose(rollout.advantage.numpy(), truth, rtol=1e-4, atol=1e-3)
        returns = truth + value[:-1]
        history.append(returns[flags[2]])
        # The newest rollout has weight 1, the one before POPART_DECAY, then POPART_DECAY², …
        weights_ = [POPART_DECAY**age for age in reversed(range(len(history)))]
        mean = sum(s * r.mean() for s, r in zip(weights_, history, strict=True)) / sum(weights_)
        square = sum(s * (r**2).mean() for s, r in zip(weights_, history, strict=True)) / sum(
            weights_
        )
        std = math.sqrt(square - mean**2)
        now = popart.mean_and_std
        assert [part.item() for part in now] == pytest.approx([mean, std], rel=1e-4)
        np.testing.assert_allclose(rollout.return_, (returns - mean) / std, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(
            rollout.value[:-1], (value[:-1] - mean) / std, rtol=1e-3, atol=1e-3
        )
        after = head(features).detach().double() * std + mean
        torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
    assert abs(mean) > 20, "the returns are nowhere near what a network starts with"


def test_popart_of_constant_or_no_returns():
    popart = PopArt()
    popart.reset_parameters()
    popart.update(torch.zeros(0), SINGLE_PROCESS)
    assert [part.item() for part in popart.mean_and_std] == [0.0, 1.0]
    popart.update(torch.full((5,), 7.0), SINGLE_PROCESS)
    assert [part.item() for part in popart.mean_and_std] == pytest.approx([7.0, 1e-4])


def test_popart_learns_large_values_quickly():
    """Reward 1,000 with a time limit of one step gives value 2,000, far from the initial output."""
    found = []
    for popart in (True, False):
        changes = {"popart": popart, "gamma": 0.5, "learning_rate": 0.01}
        agent = build(4, shape=(1,), epochs=4, **changes)
        obs, over = np.ones((4, 1), np.float32), np.zeros(4, bool)
        for _ in range(25 * 16):
            valid, no = ~over, np.zeros(4, bool)
            over = valid.copy()
            reward = np.where(valid, 1000, 0).astype(np.float32)
            agent.observe(act(agent, obs), Step(obs, reward, no, over, valid, ()))
            agent.update()
        network = agent._learner.network.module
        normalised = network(torch.from_numpy(obs))[1].mean().item()
        mean, std = (0.0, 1.0) if network.popart is None else network.popart.mean_and_std
        found.append(float(normalised * std + mean))
    assert found[0] == pytest.approx(2_000, rel=0.05)
    assert found[1] < 200


@pytest.mark.parametrize(
    "change", [{}, {"normalize_reward": True, "clip_value": True}, {"recurrent__cell": "lstm"}]
)
def test_a_restored_agent_continues_bitwise(change):
    one, other = (build(seed=seed, popart=True, **change) for seed in (1, 2))
    env = Episodes()
    _, obs = learn(one, env, env.reset(), 2)
    obs = collect(one, env, obs, 5)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    env_copy = copy.deepcopy(env)
    for agent, world in ((one, env), (other, env_copy)):
        learn(agent, world, collect(agent, world, obs, 11), 0)
        agent.update()
    for name, tensor in one.weights().items():
        assert torch.equal(tensor, other.weights()[name]), name
    assert "popart.moments" in one.weights()


def test_an_interrupted_update_is_rolled_back():
    agent, env = build(popart=True), Episodes(scale=9.0)
    _, obs = learn(agent, env, env.reset(), 2)
    collect(agent, env, obs, 16)
    before = {name: tensor.clone() for name, tensor in agent.weights().items()}
    values = agent._rollout.value.clone()

    learner, updates = agent._learner, agent.updates
    step = learner.step

    def interrupted(*args):
        step(*args)
        if learner.updates == updates + 2:
            learner.stop.request()

    learner.step = interrupted
    assert agent.update() is None
    assert agent.updates == updates and learner.stop.confirmed
    assert torch.equal(agent._rollout.value, values)
    for name, tensor in agent.weights().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.long
def test_compiled_updates_learn_the_same():
    weights = []
    for graph in (False, True):
        agent = build(popart=True, epochs=1, minibatches=1, compile=str(graph).lower())
        if graph:
            as_traced(agent._learner)
        env = Episodes(scale=9.0)
        learn(agent, env, env.reset(), 2)
        weights.append(agent._learner.network.weights)
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def test_popart_on_ranks_equals_one_process():
    changes = {"minibatches": 1, "popart": True, "normalize_obs": True, "epochs": 2}
    timesteps = random_timesteps(2, 3)
    one = build(2 * ENVS, **changes)
    truth = snapshots(one, timesteps, 0, 2 * ENVS, lambda agent, step: None)
    for rank in together(2, one_rank, timesteps, changes):
        for theirs, ours in zip(rank, truth, strict=True):
            for name in ("weights", "train/value_loss", "train/explained_variance"):
                np.testing.assert_allclose(theirs[name], ours[name], rtol=2e-5, atol=1e-6)
