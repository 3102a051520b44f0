"""Greedy and ε-greedy actors of any recurrent network."""

import numpy as np
import pytest
import torch

from steadyrl.agents.actors.epsilon_greedy import EpsilonGreedyActor
from steadyrl.agents.actors.recurrent import RecurrentGreedyActor
from steadyrl.envs.types import DiscreteActions, EnvSpec

ENVS, ACTIONS = 3, 5
SPEC = EnvSpec("Sums", ENVS, (1,), "float32", 1, DiscreteActions(ACTIONS))


def q_network(obs, hidden_state):
    """Return Q-values that are highest for the sum of the episode's observations, mod 5."""
    after = hidden_state + obs.view(-1, 1, 1)
    q = torch.nn.functional.one_hot(after.flatten().long() % ACTIONS, ACTIONS)
    return q, after


def with_values(obs, hidden_state):
    q, after = q_network(obs, hidden_state)
    return q, q.amax(1), after


def greedy(network=q_network):
    return RecurrentGreedyActor(network, lambda q: q.argmax(1), torch.zeros(ENVS, 1, 1))


def timesteps(count, seed=0):
    random = np.random.default_rng(seed)
    for t in range(count):
        obs = random.integers(9, size=(ENVS, 1)).astype(np.float32)
        yield obs, (random.random(ENVS) < 0.2) | (t == 0)


@pytest.mark.parametrize("network", [q_network, with_values])
def test_hidden_states_are_carried_and_reset(network):
    actor, total = greedy(network), np.zeros(ENVS)
    for obs, episode_starts in timesteps(50):
        total[episode_starts] = 0
        decision = actor.act(obs, episode_starts)
        assert decision.hidden_state.flatten().tolist() == total.tolist()
        total += obs[:, 0]
        assert decision.env_action.tolist() == (total % ACTIONS).tolist()


def test_an_epsilon_greedy_actor_restores_the_hidden_states():
    actor, other = (
        EpsilonGreedyActor(greedy(), SPEC, epsilon=lambda: 0.3, seed=seed) for seed in (0, 1)
    )
    assert actor.nbytes == 4 * ENVS
    for number, (obs, episode_starts) in enumerate(timesteps(40)):
        decision = actor.act(obs, episode_starts)
        actor.check_decision(decision)
        if number >= 20:
            same = other.act(obs, episode_starts)
            assert torch.equal(same.env_action, decision.env_action)
            assert torch.equal(same.hidden_state, decision.hidden_state)
        if number == 19:
            other.load_state_dict(actor.state_dict())
    with pytest.raises(ValueError, match="shape"):
        actor.check_decision(decision._replace(hidden_state=torch.zeros(ENVS, 2, 1)))
