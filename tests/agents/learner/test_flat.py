import pytest
import torch
from torch import nn

from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.optimizers.adam import (
    adam_,
    adam_state,
    adam_traceable_,
    clip_grad_norm_,
)
from steadyrl.agents.networks.init import uniform_
from steadyrl.agents.networks.q_network import QNetwork

CPU = torch.device("cpu")


def flat(seed=0):
    torch.manual_seed(seed)
    return FlatNetwork(QNetwork((4,), "float32", 2, (8, 8), True), CPU)


def test_parameters_and_gradients_are_views_of_flat_tensors():
    net = flat()
    net.module(torch.ones(3, 4)).sum().backward()
    total = torch.cat([p.grad.reshape(-1) for p in net.module.parameters()])
    assert torch.equal(total, net.gradient)
    net.weights.zero_()
    assert all(not p.any() for p in net.module.parameters())


def test_the_functional_network_equals_the_module():
    net, x = flat(), torch.randn(5, 4)
    torch.testing.assert_close(net.function(net.weights)(x), net.module(x))
    assert not net.function(torch.zeros_like(net.weights))(x).any()


@pytest.mark.parametrize("step", [adam_, adam_traceable_])
@torch.no_grad()
def test_adam_on_the_flat_tensor_equals_torch_adam(step):
    net, data = flat(), torch.randn(64, 4)
    torch.manual_seed(0)
    reference = QNetwork((4,), "float32", 2, (8, 8), True)
    optimizer = torch.optim.Adam(reference.parameters(), lr=1e-3)
    state, rate = adam_state(net.weights), torch.tensor(1e-3)
    for _ in range(50):
        net.gradient.zero_()
        with torch.enable_grad():
            net.module(data).square().mean().backward()
        clip_grad_norm_(net.gradient, 0.5)
        step(net.weights, net.gradient, state, rate, epsilon=1e-8)
        optimizer.zero_grad()
        with torch.enable_grad():
            reference(data).square().mean().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    torch.testing.assert_close(net.weights, expected, rtol=1e-5, atol=1e-6)


def test_clipping_keeps_the_direction_and_returns_the_original_norm():
    gradient = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(gradient, 1.0).item() == 5.0
    torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8]))
    assert clip_grad_norm_(gradient, 10.0).item() == torch.linalg.vector_norm(gradient).item()
    large = torch.tensor([30.0, 40.0])
    clip_grad_norm_(large, 0.0)
    assert large.tolist() == [30.0, 40.0]


def test_initialisation_uses_its_own_generator():
    before = torch.random.get_rng_state()
    nets = []
    for seed in (1, 1, 2):
        with torch.device("meta"):
            module = QNetwork((4,), "float32", 2, (8,), False)
        module.to_empty(device="cpu")
        uniform_(module, torch.Generator().manual_seed(seed))
        nets.append(FlatNetwork(module, CPU).weights)
    assert torch.equal(nets[0], nets[1])
    assert not torch.equal(nets[0], nets[2])
    assert torch.equal(before, torch.random.get_rng_state())
    assert nets[0].abs().max() <= 0.5  # 1/√fan_in of the first layer
