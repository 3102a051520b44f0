"""Networks traced with one batch size, as the ONNX export does, take any other."""

from dataclasses import replace

import pytest
import torch

from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.actor_critic import ParallelLayerNorm
from steadyrl.agents.networks.q_network import QNetwork
from tests.agents.networks.test_action_mask import CPU, MASKS, SPEC

pytestmark = pytest.mark.filterwarnings("ignore:.*trace")
STACKED = Masks.of(replace(SPEC, frame_stack=3), CPU)


@pytest.mark.parametrize("masks", [None, MASKS, STACKED])
@pytest.mark.parametrize("shape", [(), (5,)])
@pytest.mark.parametrize("dueling", [False, True])
def test_q_networks(masks, shape, dueling):
    width = 3 * SPEC.frame_shape[0] if masks is STACKED else SPEC.frame_shape[0]
    features = width if masks is None else masks.features(torch.zeros(1, width)).shape[1]
    network = QNetwork((features,), "float32", 3, [8], dueling, shape, masks=masks)
    network.reset_parameters(torch.Generator().manual_seed(0))
    traced, obs = torch.jit.trace(network, torch.zeros(2, width)), torch.randn(7, width)
    torch.testing.assert_close(traced(obs), network(obs))
    if masks is not None:
        allowed = torch.jit.trace(masks.allowed, torch.zeros(2, width))
        assert torch.equal(allowed(obs), masks.allowed(obs))


def test_parallel_layer_norm():
    traced = torch.jit.trace(ParallelLayerNorm(4), torch.zeros(2, 3, 4))
    graph = traced.inlined_graph
    (norm,) = graph.findAllNodes("aten::layer_norm")
    shape = norm.inputsAt(1).node()  # ONNX has layer norms of constant shapes only
    assert {each.node().kind() for each in shape.inputs()} == {"prim::Constant"}
