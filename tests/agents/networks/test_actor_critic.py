"""The actor-critic network: its tanh, its parallel trunk and its initialisation."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steadyrl.agents.engine.graphs.trace import trace
from steadyrl.agents.networks.activations import tanh
from steadyrl.agents.networks.actor_critic import ActorCritic, ParallelLinear, ParallelMLP
from steadyrl.agents.networks.distributions import BoxHead, DiscreteHead
from steadyrl.agents.networks.settings import PLAIN, NetworkSettings

TANH = replace(PLAIN, activation="tanh")


def build(shape=(4,), dtype="float32", head=None, hidden=(64, 64), **changes):
    options = {"network": TANH, "shared": False, "normalise": False, "log_std": -0.5}
    net = ActorCritic(shape, dtype, head or DiscreteHead(3), hidden=hidden, **options | changes)
    net.reset_parameters(torch.Generator().manual_seed(0))
    return net


def test_tanh_and_its_gradient():
    x = torch.linspace(-20, 20, 4001, dtype=torch.float32)
    for input_ in (x, x.clone().requires_grad_()):
        torch.testing.assert_close(tanh(input_).detach(), torch.tanh(x), atol=3e-7, rtol=0)
    y = x.clone().requires_grad_()
    tanh(y).sum().backward()
    torch.testing.assert_close(y.grad, 1 - torch.tanh(x) ** 2, atol=6e-7, rtol=0)
    assert torch.equal(x, torch.linspace(-20, 20, 4001))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bfloat16_tanh_is_accurate_near_zero(dtype):
    """Against float64: 2σ(2x) − 1 in bfloat16 would be 0 for all x below 0.004."""
    small = torch.logspace(-4, 0.5, 500)
    x = torch.cat((-small, small)).to(dtype)
    expected = torch.tanh(x.double()).to(dtype)
    for given in (x, x.clone().requires_grad_()):
        y = tanh(given).detach()
        assert y.dtype == dtype
        torch.testing.assert_close(y, expected, rtol=torch.finfo(dtype).eps, atol=0)
    graph, _ = trace(lambda given: (tanh(given),), (x,))
    torch.testing.assert_close(graph(x)[0], expected, rtol=torch.finfo(dtype).eps, atol=0)
    y = x.clone().requires_grad_()
    tanh(y).sum().backward()
    derivative = 1 - torch.tanh(x.double()) ** 2
    torch.testing.assert_close(y.grad.double(), derivative, atol=4 * torch.finfo(dtype).eps, rtol=0)


def test_parallel_mlp_equals_two_separate_mlps():
    trunk = ParallelMLP(5, (7, 6), "relu")
    for layer in trunk.layers:
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(2))
    x = torch.randn(9, 5)
    for which, features in enumerate(trunk(x)):
        y = x
        for layer in trunk.layers:
            y = torch.relu(y @ layer.weight[which] + layer.bias[which])
        torch.testing.assert_close(features, y)


def test_policy_and_value_share_no_weights_by_default():
    net = build()
    net(torch.randn(8, 4))[1].sum().backward()
    gradient = net.trunk.layers[0].weight.grad
    assert gradient[0].abs().sum() == 0
    assert gradient[1].abs().sum() > 0
    net = build(shared=True)
    net(torch.randn(8, 4))[1].sum().backward()
    assert net.trunk.both.layers[0].weight.grad.abs().sum() > 0


def gain(weight):
    return torch.linalg.svdvals(weight)


@pytest.mark.parametrize("shared", [True, False])
def test_orthogonal_gains_of_trunk_policy_and_value(shared):
    net = build(shared=shared)
    assert gain(net.policy.weight).tolist() == pytest.approx([0.01] * 3)
    assert gain(net.value.weight).tolist() == pytest.approx([1.0])
    layers = [m for m in net.trunk.modules() if isinstance(m, nn.Linear | ParallelLinear)]
    assert len(layers) == 2
    for layer in layers:
        singular = gain(layer.weight).flatten().tolist()
        assert singular == pytest.approx([2**0.5] * len(singular), rel=1e-5)
    assert all((p == 0).all() for name, p in net.named_parameters() if name.endswith("bias"))


def test_initial_policy_is_nearly_uniform_and_log_std_is_the_configured_one():
    parameters, value = build(head=BoxHead(2))(torch.randn(16, 4))
    assert parameters[:, :2].abs().max() < 0.05
    assert (parameters[:, 2:] == -0.5).all()
    assert value.shape == (16,)


@pytest.mark.parametrize(("shared", "convolutions"), [(None, 3), (True, 3), (False, 6)])
def test_images_use_convolutions(shared, convolutions):
    net = build((4, 84, 84), "uint8", hidden=(32,), shared=shared)
    obs = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    parameters, value = net(obs)
    assert parameters.shape == (2, 3)
    assert value.shape == (2,)
    assert sum(isinstance(m, nn.Conv2d) for m in net.modules()) == convolutions


def test_the_seed_determines_the_weights():
    def flat(seed):
        net = build()
        net.reset_parameters(torch.Generator().manual_seed(seed))
        return torch.cat([p.flatten() for p in net.parameters()])

    assert torch.equal(flat(0), flat(0))
    assert not torch.equal(flat(0), flat(1))


def test_an_encoder_of_vectors_is_used_by_both_trunks(monkeypatch):
    """Today all encoders are of images."""
    built = []

    def build_trunk(shape, dtype, hidden, network):
        built.append(nn.Linear(shape[0], hidden[-1]))
        return built[-1], hidden[-1]

    monkeypatch.setattr("steadyrl.agents.networks.actor_critic.build_trunk", build_trunk)
    monkeypatch.setattr(NetworkSettings, "encoder_for", lambda self, shape: "own")
    net = build()
    assert [net.trunk.policy, net.trunk.value] == built
