"""Acting in NumPy: the network's own numbers, whatever the weights have become."""

import numpy as np
import pytest
import torch
from ppo_agents import CPU, SPACES, Episodes, build, collect, learn

from agents.ppo_acting import ActingOnDevice, ActingOnHost, Noise


def both(agent):
    """Return the agent's own acting and that of the network, with noise that is the same."""
    module, head = agent._network.module, agent._head
    noise = [Noise(head, rows=16, num_envs=3, device=CPU, seed=5) for _ in range(2)]
    return agent._acting, ActingOnDevice(module, head, CPU), *noise


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("name", SPACES)
def test_numpy_decides_what_the_network_decides(name, activation, shape):
    agent = build(
        action=SPACES[name],
        activation=activation,
        hidden=(16, 8),
        shape=shape,
        normalize_obs=True,
        learning_rate=0.1,
    )
    env = Episodes(shape=shape, scale=3.0)
    _, obs = learn(agent, env, env.reset(), 3)  # neither weights nor statistics as they began
    mine, network, noise, same = both(agent)
    assert isinstance(mine, ActingOnHost)
    for _ in range(20):
        one, two = mine.sample(obs, noise), network.sample(obs, same)
        torch.testing.assert_close(one.action, two.action)
        torch.testing.assert_close(mine.greedy(obs).action, network.greedy(obs).action)
        obs = env.step().obs


def test_log_probabilities_and_values_follow_for_all_rows():
    agent = build(shape=(4,), normalize_obs=True)
    env = Episodes()
    _, obs = learn(agent, env, env.reset(), 2)
    collect(agent, env, obs, 16)
    rollout = agent._rollout
    rollout.log_prob.fill_(np.nan)
    rollout.value.fill_(np.nan)
    agent._acting.score(rollout, piece=7)  # 48 rows: the last piece is a smaller one
    for t in range(16):
        parameters, value = agent._network.module(rollout.obs[t])
        log_prob, _ = agent._head.evaluate(parameters, rollout.action[t])
        torch.testing.assert_close(rollout.log_prob[t], log_prob.detach())
        torch.testing.assert_close(rollout.value[t], value.detach())


@pytest.mark.parametrize("changes", [{"shared_trunk": True}, {"shape": (1, 8, 8)}])
def test_other_networks_decide_on_their_device(changes):
    assert isinstance(build(**changes)._acting, ActingOnDevice)


def test_noise_goes_on_from_its_state_within_a_rollout():
    head = build()._head
    noise, other = (Noise(head, rows=4, num_envs=3, device=CPU, seed=s) for s in (0, 1))
    for _ in range(6):
        noise.row()
    other.load_state_dict(noise.state_dict())
    for _ in range(9):
        torch.testing.assert_close(noise.row(), other.row(), rtol=0, atol=0)
