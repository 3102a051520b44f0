"""Policy heads against torch.distributions, and samples against probabilities."""

import pytest
import torch
from torch import distributions as d

from steadyrl.agents.networks.distributions import BoxHead, build_head
from steadyrl.envs.types import (
    BoxActions,
    DiscreteActions,
    MultiBinaryActions,
    MultiDiscreteActions,
)

CPU = torch.device("cpu")
SPACES = {
    "discrete": DiscreteActions(5),
    "multidiscrete": MultiDiscreteActions((2, 5, 3)),
    "multibinary": MultiBinaryActions(4),
    "box": BoxActions((-1e-3, -1e-3), (1e-3, 1e-3)),
}


def oracle(space, parameters):
    if isinstance(space, DiscreteActions):
        return d.Categorical(logits=parameters)
    if isinstance(space, MultiBinaryActions):
        return d.Independent(d.Bernoulli(logits=parameters), 1)
    mean, log_std = parameters.chunk(2, -1)
    return d.Independent(d.Normal(mean, log_std.exp()), 1)


def sampled(space, rows=6, seed=0):
    head = build_head(space, CPU)
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(rows, head.size, generator=generator)
    noise = head.draw_(torch.empty(rows, *head.noise_shape), generator)
    action = head.sample(parameters, noise)
    return head, parameters, action, head.log_prob(parameters, action)


@pytest.mark.parametrize("name", ["discrete", "multibinary", "box"])
def test_log_prob_and_entropy_equal_torch_distributions(name):
    head, parameters, action, log_prob = sampled(SPACES[name])
    truth = oracle(SPACES[name], parameters)
    evaluated, entropy = head.evaluate(parameters, action)
    torch.testing.assert_close(evaluated, truth.log_prob(action.float()))
    torch.testing.assert_close(log_prob, evaluated)
    torch.testing.assert_close(entropy, truth.entropy())


def test_multi_discrete_is_the_sum_of_discrete_heads():
    nvec = (2, 5, 3)
    head, parameters, action, log_prob = sampled(SPACES["multidiscrete"])
    rows = parameters.view(-1, 3, 5)
    each = [d.Categorical(logits=rows[:, c, :n]) for c, n in enumerate(nvec)]
    truth = sum(c.log_prob(action[:, i]) for i, c in enumerate(each))
    evaluated, entropy = head.evaluate(parameters, action)
    torch.testing.assert_close(evaluated, truth)
    torch.testing.assert_close(log_prob, truth)
    torch.testing.assert_close(entropy, sum(c.entropy() for c in each))


@pytest.mark.parametrize("name", SPACES)
def test_action_shapes_and_dtypes_match_the_environment(name):
    head, _, action, log_prob = sampled(SPACES[name])
    assert action.shape == (6, *head.action_shape)
    assert action.dtype == head.action_dtype
    assert log_prob.shape == (6,)


def frequencies(space, parameters, draws=20_000):
    head = build_head(space, CPU)
    generator = torch.Generator().manual_seed(1)
    noise = head.draw_(torch.empty(draws, *head.noise_shape), generator)
    return head.sample(parameters.expand(draws, -1), noise)


def test_discrete_samples_follow_the_probabilities():
    logits = torch.tensor([[2.0, -1.0, 0.0, 1.0]])
    drawn = torch.bincount(frequencies(DiscreteActions(4), logits), minlength=4) / 20_000
    torch.testing.assert_close(drawn, logits.softmax(-1)[0], atol=0.015, rtol=0)


def test_padded_choices_are_never_sampled():
    parameters = torch.full((1, 6), 3.0)  # (2, 3) padded to 2 x 3; the pad has a high logit too
    parameters[0, 2] = 50.0
    drawn = frequencies(MultiDiscreteActions((2, 3)), parameters)
    assert torch.bincount(drawn[:, 0], minlength=3)[2] == 0
    torch.testing.assert_close(drawn[:, 0].float().mean(), torch.tensor(0.5), atol=0.015, rtol=0)
    assert set(drawn[:, 1].tolist()) == {0, 1, 2}


def test_binary_samples_follow_the_probabilities():
    logits = torch.tensor([[2.0, -1.0, 0.0]])
    on = frequencies(MultiBinaryActions(3), logits).float().mean(0)
    torch.testing.assert_close(on, logits.sigmoid()[0], atol=0.015, rtol=0)


def test_gaussian_samples_have_mean_and_std():
    parameters = torch.tensor([[1.0, -2.0, 0.0, -1.0]])
    drawn = frequencies(BoxActions((-1, -1), (1, 1)), parameters)
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -2.0]), atol=0.03, rtol=0)
    torch.testing.assert_close(drawn.std(0), parameters[0, 2:].exp(), atol=0.03, rtol=0)


def test_the_greedy_action_is_the_mode():
    for space in SPACES.values():
        head, parameters, action, _ = sampled(space)
        best = head.evaluate(parameters, head.greedy(parameters))[0]
        assert (best >= head.evaluate(parameters, action)[0] - 1e-6).all()


def test_log_std_is_state_independent():
    layer = BoxHead(3).layer(8, -2.0)
    layer.reset_parameters()
    out = layer(torch.randn(5, 8))
    assert (out[:, 3:] == -2.0).all()
    out[:, 3:].sum().backward()
    torch.testing.assert_close(layer.log_std.grad, torch.full((3,), 5.0))
