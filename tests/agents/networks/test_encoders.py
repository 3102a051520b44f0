"""Encoders match the papers and plain PyTorch, and are initialised as configured."""

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from steadyrl.agents.engine.cpu.activations import CODES, activate
from steadyrl.agents.engine.graphs.trace import trace
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.networks.activations import ACTIVATIONS
from steadyrl.agents.networks.actor_critic import ActorCritic, ParallelLayerNorm, ParallelLinear
from steadyrl.agents.networks.distributions import DiscreteHead
from steadyrl.agents.networks.encoders import CONVOLUTIONS, Residual, build_trunk
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.networks.settings import EncoderName, NetworkSettings, fitting

FRAMES, BOARD = (4, 84, 84), (4, 10, 10)
TORCHS = {"relu": torch.relu, "tanh": torch.tanh, "elu": F.elu, "silu": F.silu}


def network(encoder="auto", layer_norm=False, init="auto"):
    return NetworkSettings(encoder=encoder, activation="relu", layer_norm=layer_norm, init=init)


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


def observations(shape, dtype="uint8", rows=3):
    g = torch.Generator().manual_seed(1)
    if dtype == "uint8":
        return torch.randint(0, 256, (rows, *shape), generator=g, dtype=torch.uint8)
    return torch.randn(rows, *shape, generator=g)


def convolved(x, convolution, **options):
    return F.conv2d(x, convolution.weight, convolution.bias, **options)


def naive_nature(convolutions, x):
    for convolution, stride in zip(convolutions, (4, 2, 1), strict=True):
        x = torch.relu(convolved(x, convolution, stride=stride))
    return x


def naive_der(convolutions, x):
    for convolution in convolutions:
        x = torch.relu(convolved(x, convolution, stride=5))
    return x


def naive_minatar(convolutions, x):
    (convolution,) = convolutions
    return torch.relu(convolved(x, convolution))


def naive_impala(convolutions, x):
    rest = iter(convolutions)
    for _ in range(3):
        x = F.max_pool2d(convolved(x, next(rest), padding=1), 3, stride=2, padding=1)
        for _ in range(2):
            y = convolved(torch.relu(x), next(rest), padding=1)
            x = x + convolved(torch.relu(y), next(rest), padding=1)
    assert next(rest, None) is None
    return torch.relu(x)


def naive_mlp(convolutions, x):
    assert not convolutions
    return x


NAIVE = {
    "nature": naive_nature,
    "der": naive_der,
    "minatar": naive_minatar,
    "impala": naive_impala,
    "mlp": naive_mlp,
}


def test_every_encoder_has_layers_a_naive_implementation_and_a_row():
    names = {*get_args(EncoderName)}
    page = Path(__file__).parents[3] / "docs" / "networks.md"
    table = page.read_text().split("## Networks\n")[1].split("\n```")[0]
    assert {*CONVOLUTIONS, "mlp"} == names
    assert {*NAIVE} == names
    assert {line.split("`")[1] for line in table.splitlines() if line[:3] == "| `"} >= names


@pytest.mark.parametrize(
    ("activation", "layer_norm"), [("relu", False), ("tanh", True), ("elu", True), ("silu", False)]
)
@pytest.mark.parametrize(
    ("trunk", "shape", "dtype"),
    [
        ("nature", (2, 44, 40), "uint8"),
        ("impala", (3, 40, 37), "uint8"),
        ("der", (3, 40, 57), "uint8"),
        ("impala", BOARD, "float32"),
        ("minatar", BOARD, "uint8"),
        ("mlp", BOARD, "uint8"),
        ("mlp", (7,), "float32"),
    ],
)
def test_trunks_equal_naive_implementations(trunk, shape, dtype, layer_norm, activation):
    module, features = build_trunk(
        shape, dtype, (12, 9), replace(network(trunk, layer_norm), activation=activation)
    )
    g = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1, generator=g)
    obs = observations(shape, dtype)
    x = obs.float() / 255 if dtype == "uint8" else obs
    x = NAIVE[trunk]([m for m in module.modules() if isinstance(m, nn.Conv2d)], x).flatten(1)
    norms = [m for m in module.modules() if isinstance(m, nn.LayerNorm)]
    for index, layer in enumerate(m for m in module.modules() if isinstance(m, nn.Linear)):
        x = x @ layer.weight.T + layer.bias
        if layer_norm:
            deviation = (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
            x = (x - x.mean(1, keepdim=True)) / deviation
            x = x * norms[index].weight + norms[index].bias
        x = TORCHS[activation](x)
    assert len(norms) == 2 * layer_norm
    assert features == x.shape[1] == 9
    torch.testing.assert_close(module(obs), x, rtol=1e-4, atol=1e-5)


def test_a_residual_block_adds_to_its_input():
    block, x = Residual(2), torch.randn(1, 2, 5, 5)
    nn.init.zeros_(block.second.weight)
    nn.init.zeros_(block.second.bias)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize(
    ("trunk", "shape", "hidden", "actions", "parameters"),
    [
        # Mnih et al. (2015): 32 8x8, 64 4x4, 64 3x3, 512; on Breakout's four actions.
        ("nature", FRAMES, 512, 4, 8_224 + 32_832 + 36_928 + 1_606_144 + 2_052),
        # Van Hasselt et al. (2019): 32 5x5, 64 5x5, both of stride 5, 256; on Pong's six actions.
        ("der", FRAMES, 256, 6, 3_232 + 51_264 + (576 + 1) * 256 + 257 * 6),
        # Young & Tian (2019): 16 3x3 on Breakout's four channels, 128, six actions.
        ("minatar", BOARD, 128, 6, 592 + 131_200 + 774),
        # Espeholt et al. (2018), 16, 32, 32 channels, 256, on Atari's frames.
        ("impala", FRAMES, 256, 6, 97_744 + (32 * 11 * 11 + 1) * 256 + 257 * 6),
    ],
)
def test_parameter_counts_match_the_papers(trunk, shape, hidden, actions, parameters):
    net = QNetwork(shape, "uint8", actions, (hidden,), False, network=network(trunk))
    assert size(net) == parameters


def test_impala_has_15_convolutions_and_1_6_million_weights():
    """Espeholt et al. (2018), section 5.2: DMLab-30's 72x96 pictures, nine actions."""
    module, features = build_trunk((3, 72, 96), "uint8", (256,), network=network("impala"))
    assert sum(isinstance(m, nn.Conv2d) for m in module.modules()) == 15

    def lstm(inputs, units):
        return 4 * units * (inputs + units + 1)

    instruction = 1_000 * 20 + lstm(20, 64)
    core = lstm(features + 1 + 9 + 64, 256)
    heads = 257 * (9 + 1)
    assert round((size(module) + instruction + core + heads) / 1e6, 1) == 1.6


def test_auto_selects_the_trunk_by_observation():
    assert [network().encoder_for(shape) for shape in (FRAMES, BOARD, (4,), (2, 3))] == [
        "nature",
        "minatar",
        "mlp",
        "mlp",
    ]
    assert network("impala").encoder_for(BOARD) == "impala"


def both(shape, dtype, chosen, activation="relu"):
    options = {"network": replace(chosen, activation=activation)}
    yield QNetwork(shape, dtype, 3, (8, 6), dueling=True, **options)
    for shared in (False, True):
        more = {"shared": shared, "normalise": False, "log_std": 0.0}
        yield ActorCritic(shape, dtype, DiscreteHead(3), hidden=(8, 6), **more, **options)


@settings(max_examples=12, deadline=None)
@given(
    st.one_of(
        st.tuples(st.integers(1, 9)),
        st.tuples(st.integers(1, 4), st.integers(1, 45), st.integers(1, 45)),
    ),
    st.sampled_from(["uint8", "float32"]),
    st.booleans(),
    st.data(),
)
def test_trunks_accept_every_shape_they_support(shape, dtype, layer_norm, data):
    dtype = dtype if len(shape) == 3 else "float32"
    chosen = network(data.draw(st.sampled_from(fitting(shape))), layer_norm)
    obs = observations(shape, dtype, rows=2)
    for net in both(shape, dtype, chosen):
        for parameter in net.parameters():
            nn.init.constant_(parameter, math.nan)  # as uninitialised memory could hold
        net.reset_parameters(torch.Generator().manual_seed(0))
        found = net(obs)
        found = found if isinstance(found, tuple) else (found,)
        assert found[0].shape == (2, 3)
        assert all(torch.isfinite(part).all() for part in found)
        sum(part.square().sum() for part in found).backward()
        assert all(p.grad is not None for p in net.parameters())


def weights(net):
    """Yield each layer's weights as a matrix with a row per unit, and its fan-in."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            yield module.weight.detach().flatten(1), module.bias
        elif isinstance(module, ParallelLinear):
            for weight, bias in zip(module.weight.detach(), module.bias, strict=True):
                yield weight.T, bias


def initialised(shape, dtype, chosen, seed=0):
    for net in both(shape, dtype, chosen):
        for parameter in net.parameters():
            nn.init.constant_(parameter, 7.0)  # as uninitialised memory could hold
        net.reset_parameters(torch.Generator().manual_seed(seed), chosen.init)
        yield net


START = [((4,), "float32", "mlp"), (BOARD, "uint8", "impala"), (BOARD, "uint8", "minatar")]


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "trunk"), START)
def test_uniform_initialisation_fills_its_bounds(shape, dtype, trunk, layer_norm):
    chosen = network(trunk, layer_norm, "uniform")
    for net in initialised(shape, dtype, chosen):
        for weight, bias in weights(net):
            bound = 1 / math.sqrt(weight.shape[1])
            largest = max(weight.abs().max(), bias.abs().max())
            assert largest <= bound
            assert largest > 0.6 * bound
        norms_are_neutral(net, layer_norm)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize(("shape", "dtype", "trunk"), START)
def test_orthogonal_initialisation_has_the_given_gains(shape, dtype, trunk, layer_norm):
    chosen = network(trunk, layer_norm, "orthogonal")
    for net in initialised(shape, dtype, chosen):
        heads = [net.advantage, net.value] if isinstance(net, QNetwork) else [net.policy, net.value]
        gains = [1.0, 1.0] if isinstance(net, QNetwork) else [0.01, 1.0]
        expected = dict(zip(map(id, (head.bias for head in heads)), gains, strict=True))
        for weight, bias in weights(net):
            gain = expected.get(id(bias), math.sqrt(2))
            singular = torch.linalg.svdvals(weight)
            torch.testing.assert_close(singular, torch.full_like(singular, gain))
            assert not bias.any()
        norms_are_neutral(net, layer_norm)


def norms_are_neutral(net, layer_norm):
    norms = [m for m in net.modules() if isinstance(m, nn.LayerNorm | ParallelLayerNorm)]
    assert bool(norms) == layer_norm
    for norm in norms:
        assert (norm.weight == 1).all() and not norm.bias.any()


@pytest.mark.parametrize("which", [0, 1])
def test_auto_initialisation_per_algorithm(which):
    """DQN: uniform; PPO: orthogonal."""
    expected_init = ("uniform", "orthogonal")[which]
    pairs = (initialised((4,), "float32", network(init=init)) for init in ("auto", expected_init))
    one, two = (list(nets)[which] for nets in pairs)
    for mine, other in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_host_activations_equal_torch(name):
    x = np.concatenate([np.linspace(-8, 8, 641), [-1e30, -200, 0.0, 200, 1e30]]).astype(np.float32)
    expected = TORCHS[name](torch.from_numpy(x.copy()))
    layer = ACTIVATIONS[name](torch.from_numpy(x.copy()))
    torch.testing.assert_close(layer, expected, rtol=1e-6, atol=1e-6)
    activate(x, CODES[name])
    torch.testing.assert_close(torch.from_numpy(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_host_activations_are_accurate_everywhere(name):
    """Relative to torch in float64, also where a function is nearly 0."""
    x = np.concatenate([np.linspace(-87, 30, 20_001), -np.geomspace(1e-6, 1, 200)])
    x = x.astype(np.float32)
    expected = TORCHS[name](torch.from_numpy(x).double()).float()
    activate(x, CODES[name])
    torch.testing.assert_close(torch.from_numpy(x), expected, rtol=2e-6, atol=0)


def test_host_silu_of_nan_and_infinity():
    x = np.array([-1000, -0.0, np.inf, np.nan], np.float32)
    activate(x, CODES["silu"])
    assert np.isnan(x[-1])
    assert x[2] == np.inf
    assert (x[:2] == 0).all()


@pytest.mark.parametrize(("start", "which"), [(START[0], 2), (START[1], 0)], ids=["twin", "impala"])
def test_a_network_is_a_pure_function_that_can_be_traced(start, which):
    """Compiled functions read the given weights, not the module's own."""
    shape, dtype, trunk = start
    obs = observations(shape, dtype)
    net = list(initialised(shape, dtype, network(trunk, layer_norm=True)))[which]
    flat = FlatNetwork(net, torch.device("cpu"))

    def squares(found):
        return sum(part.square().sum() for part in (found if which else (found,)))

    def gradient(given, seen):
        return torch.func.grad(lambda weights_: squares(flat.function(weights_)(seen)))(given)

    graph, _ = trace(gradient, (flat.weights, obs))
    squares(net(obs)).backward()
    expected, given = flat.gradient.clone(), flat.weights.clone()
    flat.weights.zero_()
    torch.testing.assert_close(graph(given, obs), expected, rtol=1e-4, atol=1e-5)
