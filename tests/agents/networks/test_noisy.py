"""Noisy layers against explicit noise matrices, and exploration with them."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from steadyrl.agents.dqn.loss import td_loss
from steadyrl.agents.dqn.noise import UpdateNoise
from steadyrl.agents.dqn.q_heads import ScalarHead
from steadyrl.agents.networks.init import orthogonal_, uniform_
from steadyrl.agents.networks.noisy import NoisyLinear, draw_noise
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.networks.settings import NetworkSettings
from steadyrl.core.errors import SettingError
from tests.agents.dqn.test_agent import CPU, Chain, act, build, run
from tests.agents.dqn.test_loss import batch
from tests.agents.learner.test_learner import as_traced

SIGMA = 0.5


def noisy(inputs, outputs):
    return NoisyLinear(inputs, outputs, sigma=SIGMA)


def layer(inputs=5, outputs=3):
    made = noisy(inputs, outputs).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(parameter)))
    return made


def drawn(weights, noise):
    """Weight and bias of one noise sample, with the explicit noise matrix."""
    mu, mu_bias, sigma, sigma_bias = weights
    entering, leaving = noise[: mu.shape[1]], noise[mu.shape[1] :]
    return mu + sigma * torch.outer(leaving, entering), mu_bias + sigma_bias * leaving


def test_noisy_outputs_equal_an_explicit_noise_matrix():
    made, g = layer(), torch.Generator().manual_seed(0)
    x = torch.randn(7, 5, generator=g, dtype=torch.float64)
    each = draw_noise(7, made.noise_size, g).double()
    weights = tuple(made.parameters())
    for noise in (each[0], each):
        expected = []
        for row, online in zip(x, noise.expand(7, -1), strict=True):
            weight, bias = drawn(weights, online)
            expected.append(weight @ row + bias)
        torch.testing.assert_close(made(x, noise), torch.stack(expected))
    torch.testing.assert_close(made(x), x @ weights[0].T + weights[1])


def test_moments_of_noisy_outputs_in_closed_form():
    made, draws = layer(), 200_000
    x = torch.linspace(-1, 2, 5, dtype=torch.float64)
    noise = draw_noise(draws, made.noise_size, torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        y = made(x.expand(draws, -1), noise)
    weight, bias, sigma, sigma_bias = (p.detach() for p in made.parameters())
    one = math.sqrt(2 / math.pi)  # E f(ε)² = E |ε|
    variance = one**2 * (sigma.square() @ x.square()) + one * sigma_bias.square()
    error = (variance / draws).sqrt()
    assert ((y.mean(0) - (weight @ x + bias)).abs() < 4 * error).all()
    torch.testing.assert_close(y.var(0), variance, rtol=0.03, atol=0)


def test_noise_is_the_signed_root_of_a_normal_variable():
    noise, g = draw_noise(400, 50, torch.Generator().manual_seed(3)), torch.Generator()
    normal = torch.randn((400, 50), generator=g.manual_seed(3))
    assert torch.equal(noise, normal.sign() * normal.abs().sqrt())


@pytest.mark.parametrize("start", [uniform_, lambda m, g: orthogonal_(m, 1.0, g)])
def test_initial_means_and_sigmas(start):
    made = torch.nn.Sequential(noisy(16, 50))
    start(made, torch.Generator().manual_seed(0))
    assert made[0].weight.abs().max() > 0.2
    if start is uniform_:
        assert made[0].weight.abs().max() <= 0.25 and made[0].bias.abs().max() <= 0.25
    assert {p.item() for p in made[0].weight_sigma.unique()} == {SIGMA / 4}
    assert {p.item() for p in made[0].bias_sigma.unique()} == {SIGMA / 4}


def network(shape=(4,), dueling=True, atoms=(), seed=0, linear=noisy, encoder="auto"):
    settings = NetworkSettings(encoder=encoder, activation="relu", layer_norm=True, init="auto")
    dtype = "float32" if len(shape) == 1 else "uint8"
    made = QNetwork(shape, dtype, 3, (8, 6), dueling, atoms, network=settings, linear=linear)
    made.reset_parameters(torch.Generator().manual_seed(seed))
    return made


def plain_network(made, noise, **changes):
    """A plain network with the weights of one noise sample."""
    plain = network(linear=torch.nn.Linear, **changes)
    left, state = noise, made.state_dict()
    for name, part in made.named_modules():
        if isinstance(part, NoisyLinear):
            weight, bias = drawn(tuple(part.parameters()), left[: part.noise_size])
            left = left[part.noise_size :]
            state |= {f"{name}.weight": weight, f"{name}.bias": bias}
    assert not len(left)
    plain.load_state_dict({n: tensor for n, tensor in state.items() if "sigma" not in n})
    return plain


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(("shape", "atoms"), [((4,), ()), ((4,), (5,)), ((3, 10, 10), (5,))])
def test_noisy_networks_equal_plain_ones_with_sampled_weights(shape, atoms, dueling):
    options = {"shape": shape, "dueling": dueling, "atoms": atoms}
    made, g = network(**options), torch.Generator().manual_seed(1)
    obs = torch.randint(0, 255, (6, *shape), generator=g)
    obs = obs.float() / 255 if len(shape) == 1 else obs.to(torch.uint8)
    noise = draw_noise(6, made.noise_size, g)
    one = plain_network(made, noise[0], **options)(obs)
    torch.testing.assert_close(made(obs, noise[0]), one, rtol=1e-4, atol=1e-5)
    online = [
        plain_network(made, each, **options)(row[None])[0]
        for each, row in zip(noise, obs, strict=True)
    ]
    torch.testing.assert_close(made(obs, noise), torch.stack(online), rtol=1e-4, atol=1e-5)
    convolutions = [n for n, _ in made.named_parameters() if "sigma" in n and "trunk.1" in n]
    assert not convolutions, "only dense layers are noisy"


@pytest.mark.parametrize("double", [False, True])
def test_values_targets_and_action_selection_have_separate_noise(double):
    online, target = network(), network(seed=1)
    floats = (part.float() if part.is_floating_point() else part for part in batch())
    data = type(batch())(*floats)
    noise = draw_noise(3, online.noise_size, torch.Generator().manual_seed(2))
    plain_online, plain_target, action_selector = (
        plain_network(made, each)
        for made, each in zip((online, target, online), noise, strict=True)
    )
    got = td_loss(online, target, data, noise, head=ScalarHead(huber=False), double=double)
    after = plain_target(data.next_obs)
    best = (action_selector(data.next_obs) if double else after).argmax(1)
    y = data.reward + data.discount * after[torch.arange(len(best)), best]
    error = plain_online(data.obs)[torch.arange(len(best)), data.action] - y
    torch.testing.assert_close(got.aux[0], error.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.loss, data.weight * error.square(), rtol=1e-4, atol=1e-5)


def test_sigmas_are_learned_eagerly_and_compiled():
    weights = []
    for graph in (False, True):
        agent = build(
            2, obs=11, noisy__enabled=True, distribution__kind="c51", compile=str(graph).lower()
        )
        if graph:
            as_traced(agent._learner)
        before = agent._learner.network.weights.clone()
        run(agent, Chain(2, [3, 10], terminates=True), 109)
        assert agent.updates == 4
        after = agent._learner.network.weights
        sigmas = agent._learner.network.views(after - before)["advantage.weight_sigma"]
        assert (sigmas != 0).float().mean() > 0.5
        weights.append(after)
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def test_update_noise_depends_on_the_update_number_only():
    noise = UpdateNoise(40, CPU, seed=5)
    each = [noise.of(update)[0] for update in range(50)]
    assert torch.equal(each[7], UpdateNoise(40, CPU, seed=5).of(7)[0])
    assert not torch.equal(each[7], UpdateNoise(40, CPU, seed=6).of(7)[0])
    rows = torch.stack(each).flatten(0, 1)
    assert len(rows.unique(dim=0)) == 150
    # Different noise is uncorrelated.
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.75
    assert rows.square().mean().item() == pytest.approx(math.sqrt(2 / math.pi), rel=0.03)


def test_environments_have_separate_noise_and_greedy_actions_have_none():
    agent = build(64, actions=5, noisy__enabled=True)
    obs = np.ones((64, 4), dtype=np.float32)
    rows = [act(agent, obs).env_action for _ in range(2)]
    assert all(len(row.unique()) > 1 for row in rows)
    assert not torch.equal(*rows)
    means = agent._learner.network.module(torch.from_numpy(obs)).argmax(1)
    for _ in range(2):
        assert torch.equal(act(agent, obs, explore=False).env_action, means)
    still = build(64, actions=5, noisy__enabled=True, noisy__sigma=1e-9)
    assert len(act(still, obs).env_action.unique()) == 1


def test_noisy_agents_log_no_epsilon():
    assert "train/epsilon" not in build(noisy__enabled=True).scalars()
    assert "train/epsilon" in build().scalars()
    assert "train/epsilon" in build(noisy__enabled=True, noisy__epsilon_greedy=True).scalars()


def test_noisy_and_epsilon_greedy_actions_are_random_with_epsilon_else_noisy_ones():
    def actions(epsilon, **options):
        options |= {"epsilon_start": epsilon, "epsilon_end": epsilon}
        agent = build(64, actions=5, noisy__enabled=True, **options)
        obs = np.ones((64, 4), dtype=np.float32)
        greedy = act(agent, obs, explore=False).env_action
        return torch.stack([act(agent, obs).env_action for _ in range(200)]), greedy

    noisy_alone, greedy = actions(0.3)
    assert torch.equal(actions(0.0, noisy__epsilon_greedy=True)[0], noisy_alone)
    everywhere_random, _ = actions(1.0, noisy__epsilon_greedy=True)
    shares = everywhere_random.flatten().bincount(minlength=5) / everywhere_random.numel()
    torch.testing.assert_close(shares, torch.full((5,), 0.2), atol=0.02, rtol=0)
    both, same = actions(0.3, noisy__epsilon_greedy=True)
    assert torch.equal(same, greedy), "evaluations have neither"
    # 0.3 are random, of which a fifth is the noisy action by chance.
    changed = (both != noisy_alone).float().mean().item()
    assert changed == pytest.approx(0.3 * (1 - 1 / 5), abs=0.02)


@pytest.mark.parametrize("sigma", [0.0, -1.0, 2000.0])
def test_sigma_must_be_positive(sigma):
    with pytest.raises(SettingError, match="sigma"):
        build(noisy__sigma=sigma)


@pytest.mark.parametrize(
    ("envs", "kind", "epsilon"), list(product([1, 3], ["none", "quantile"], [False, True]))
)
def test_resuming_is_bitwise_exact(envs, kind, epsilon):
    def fresh():
        options = {"noisy__enabled": True, "noisy__epsilon_greedy": epsilon, "epsilon_end": 0.2}
        return build(envs, obs=11, distribution__kind=kind, learning_starts=20, **options)

    def lines(agent):
        chain = Chain(envs, [10], terminates=False)
        run(agent, chain, 50)
        return agent.weights(), act(agent, np.ones((envs, 11), np.float32)).env_action

    straight = fresh()
    run(straight, Chain(envs, [3, 10], terminates=True), 100)
    resumed = fresh()
    resumed.load_state_dict(straight.state_dict())
    one, other = lines(straight), lines(resumed)
    assert torch.equal(one[1], other[1])
    for name, tensor in one[0].items():
        assert torch.equal(tensor, other[0][name]), name
