"""Importance weights of sampled transitions, relative to the replay's or the batch's largest."""

import numpy as np
import pytest
import torch

from tests.agents.dqn.test_agent import Chain, build, run


@pytest.mark.parametrize("by", ["replay", "batch"])
def test_weights_are_relative_to_the_largest_of_the_replay_or_of_the_batch(by):
    agent = build(prioritized=True, normalize_weights=by, obs=8)
    run(agent, Chain(1, [3, 7], True), 400)
    priorities = agent._replay._priorities.leaves
    chance = priorities / priorities.sum()
    for beta in (0.0, 0.4, 1.0):
        batch = agent._sampler.sample(beta=beta)
        weights = (len(agent._replay) * chance[batch.index.numpy()]) ** -beta
        if by == "batch":
            largest = weights.max()
        else:
            largest = ((len(agent._replay) * chance[chance > 0]) ** -beta).max()
        np.testing.assert_allclose(batch.weight, weights / largest, rtol=1e-6)
    assert (batch.weight.max() == 1) == (by == "batch")


def test_without_priorities_every_weight_is_one():
    agent = build(prioritized=False, normalize_weights="batch", obs=8)
    run(agent, Chain(1, [3, 7], True), 200)
    assert torch.equal(agent._sampler.sample(beta=0.4).weight, torch.ones(8))
