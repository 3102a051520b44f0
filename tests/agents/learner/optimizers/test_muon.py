"""Which parameters Muon trains, and the matrices in them."""

import math
from dataclasses import replace

import pytest
import torch

from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.optimizers.muon import Layout, matrix_shape, orthogonal_all
from steadyrl.agents.learner.optimizers.optimizer import build_optimizer
from steadyrl.agents.learner.optimizers.settings import OptimizerSettings
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import build_head
from steadyrl.agents.networks.noisy import NoisyLinear
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.networks.recurrent import RecurrentActorCritic
from steadyrl.agents.networks.settings import PLAIN
from steadyrl.agents.rnd.rnd import RNDNetwork
from steadyrl.envs.types import DiscreteActions

CPU = torch.device("cpu")
MUON = OptimizerSettings(name="muon", eps=1e-5, weight_decay=0.0)


def actor_critic(
    kind=ActorCritic, shape=(5,), dtype="float32", shared=None, layer_norm=False, **more
):
    torch.manual_seed(0)
    network = replace(PLAIN, layer_norm=layer_norm)
    return kind(
        shape, dtype, build_head(DiscreteActions(2), CPU, scaled=True), hidden=(8, 6),
        shared=shared, normalise=False, log_std=0.0, network=network, masks=None, popart=False,
        **more,
    )  # fmt: skip


def noisy(inputs, outputs):
    return NoisyLinear(inputs, outputs, sigma=0.5)


RECURRENT = {"kind": RecurrentActorCritic, "size": 4, "max_length": 8}
CELL = ("cell.weight_ih", "cell.weight_hh")
IMAGES = ("3.layers.0", "3.layers.1")
# {name: (network, hidden parameters, matrices side by side in each)}
NETWORKS = {
    "dueling Q": (
        lambda: QNetwork((4,), "float32", 2, (8, 8, 6), True),
        {"trunk.layers.1.weight": 1, "trunk.layers.2.weight": 1},
    ),
    "noisy Q": (
        lambda: QNetwork((4,), "float32", 2, (8, 6), False, linear=noisy),
        {"trunk.layers.1.weight": 1},
    ),
    "Nature Q": (
        lambda: QNetwork((4, 84, 84), "uint8", 2, (16,), False),
        {"trunk.4.weight": 1, "trunk.6.weight": 1, "trunk.9.layers.0.weight": 1},
    ),
    "parallel": (actor_critic, {"trunk.layers.1.weight": 1}),
    "one input": (lambda: actor_critic(shape=(1,)), {"trunk.layers.1.weight": 1}),
    "norms": (lambda: actor_critic(layer_norm=True), {"trunk.layers.1.weight": 1}),
    "shared": (lambda: actor_critic(shared=True), {"trunk.both.layers.1.weight": 1}),
    "separate images": (
        lambda: actor_critic(shape=(2, 10, 10), shared=False),
        {f"trunk.{trunk}.{i}.weight": 1 for trunk in ("policy", "value") for i in IMAGES},
    ),
    "gru": (
        lambda: actor_critic(**RECURRENT, recurrent="gru"),
        {"trunk.layers.1.weight": 1} | dict.fromkeys(CELL, 3),
    ),
    "lstm": (
        lambda: actor_critic(**RECURRENT, recurrent="lstm", shared=True),
        {"trunk.both.layers.1.weight": 1} | dict.fromkeys(CELL, 4),
    ),
    "rnd": (
        lambda: RNDNetwork((5,), (8, 6), PLAIN),
        dict.fromkeys((f"predictor.0.layers.{i}.weight" for i in (1, 2)), 1)
        | {"value.0.layers.1.weight": 1},
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_input_layers_heads_and_vectors_are_not_trained_by_muon(name):
    build, hidden = NETWORKS[name]
    network = build()
    assert network.hidden_matrices() == hidden
    flat = FlatNetwork(network, CPU)
    flat.weights.fill_(0.5)  # some networks leave this to their own initialisation
    before = {key: value.clone() for key, value in flat.views(flat.weights).items()}
    flat.gradient.normal_(generator=torch.Generator().manual_seed(0))
    flat.gradient.add_(flat.gradient.sign())  # far from ε
    optimizer = build_optimizer(MUON, flat)
    assert len(optimizer.state.momentum) == sum(before[key].numel() for key in hidden)
    with torch.no_grad():
        optimizer.step_(flat.weights, flat.gradient, optimizer.state, torch.tensor(0.01))
    for key, value in flat.views(flat.weights).items():
        step = (value - before[key]).abs()
        # AdamW's first step is ± the learning rate, whatever the gradient.
        assert torch.allclose(step, torch.tensor(0.01), atol=1e-4) is (key not in hidden), key


def jordan(gradient):
    """Orthogonalise one matrix, as in Keller Jordan's definition, in float64."""
    x = gradient.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.T if gradient.shape[0] > gradient.shape[1] else x).float()


def matrices(parameter, gates):
    """Yield the matrices in a parameter as views."""
    if parameter.ndim == 4:
        yield parameter.view(len(parameter), -1)
        return
    stack = parameter if parameter.ndim == 3 else parameter.unsqueeze(0)
    for one in stack:
        yield from one.chunk(gates, -1)


CELLS = [(2, 4, 12), (1, 9, 12)]  # layers of cells: a matrix for each gate


@pytest.mark.parametrize(
    ("gates", "shape"),
    [
        *((1, shape) for shape in [(6, 8), (8, 6), (7, 3, 2, 2), (2, 5, 4), *CELLS]),
        *((gates, shape) for gates in (3, 4) for shape in CELLS),
    ],
)
def test_every_matrix_is_orthogonalised_alone(gates, shape):
    random = torch.Generator().manual_seed(0)
    first, second = (torch.randn(shape, generator=random) for _ in range(2))
    sizes = [matrix_shape(shape, gates)] * 2
    found = orthogonal_all([first.flatten(), second.flatten()], sizes)
    for given, one in zip((first, second), found, strict=True):
        expected = given.clone()
        for matrix in matrices(expected, gates):
            matrix.copy_(jordan(matrix))
        torch.testing.assert_close(one, expected.flatten(), rtol=1e-4, atol=1e-4)


def test_a_zero_gradient_moves_nothing():
    [found] = orthogonal_all([torch.zeros(12)], [(1, 3, 1, 4)])
    assert not found.any()


def test_a_layout_splits_and_merges_in_the_order_of_the_parameters():
    shapes = {"a": (2, 2), "bias": (3,), "b": (1, 2, 4), "c": (2,)}
    layout, flat = Layout(shapes, {"b": 2, "a": 1}), torch.arange(17.0)
    hidden, others = layout.split(flat)
    assert [part.tolist() for part in hidden] == [[0, 1, 2, 3], [*range(7, 15)]]
    assert [part.tolist() for part in others] == [[4, 5, 6], [15, 16]]
    assert torch.equal(layout.merge(hidden, torch.cat(others)), flat)
    assert layout.shapes == [(1, 2, 1, 2), (1, 2, 2, 2)]
    assert layout.numel() == math.prod((2, 2)) + math.prod((2, 4))
