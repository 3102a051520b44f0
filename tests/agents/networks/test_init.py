"""Modules built on the meta device: without memory, values and SymPy, and allocated later."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.networks.init import (
    initialise,
    materialize,
    on_meta,
    orthogonal_,
    uniform_,
)
from steadyrl.agents.networks.q_network import QNetwork


def modules():
    return nn.ModuleDict(
        {
            "linear": nn.Linear(3, 4),
            "conv": nn.Conv2d(1, 2, 3),
            "gru": nn.GRUCell(4, 5),
            "embedding": nn.Embedding(6, 2),
            "norm": nn.LayerNorm(4),
        }
    )


def test_modules_on_meta_have_the_shapes_and_names_of_others():
    with on_meta():
        found = modules()
    assert all(p.is_meta for p in found.parameters())
    shapes = {name: tensor.shape for name, tensor in found.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in modules().state_dict().items()}


def test_building_on_meta_draws_nothing_and_ends_with_its_block():
    before = torch.get_rng_state()
    with on_meta():
        modules()
    assert torch.equal(torch.get_rng_state(), before)
    weight = nn.Linear(3, 4).weight
    assert not weight.is_meta
    assert weight.std() > 0


def test_materialized_layers_equal_those_built_in_memory():
    def initialized(module):
        uniform_(module, torch.Generator().manual_seed(3))
        return module.state_dict()

    with on_meta():
        found = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    materialize(found, torch.device("cpu"))
    expected = initialized(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))
    for name, value in initialized(found).items():
        assert torch.equal(value, expected[name])


def test_networks_are_initialised_from_a_seed_as_those_built_in_memory():
    shape = (4,), "float32", 3, (8,), True
    expected = QNetwork(*shape)
    expected.reset_parameters(torch.Generator().manual_seed(7), "orthogonal")
    with on_meta():
        found = QNetwork(*shape)
    for name, value in initialise(found, 7, "orthogonal").state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])


def test_parameters_lie_as_in_training():
    with on_meta():
        found = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    trained = FlatNetwork(materialize(found, torch.device("cpu")), torch.device("cpu"))
    with on_meta():
        other = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    materialize(other, torch.device("cpu"))
    first = next(other.parameters()).data_ptr()
    for ours, theirs in zip(other.parameters(), trained.module.parameters(), strict=True):
        assert ours.data_ptr() - first == theirs.data_ptr() - trained.weights.data_ptr()
    assert [b.shape for b in other.buffers()] == [(4,), (4,), ()]


def test_building_on_meta_imports_no_sympy():
    code = (
        "import sys\nfrom torch import nn\nfrom steadyrl.agents.networks.init import on_meta\n"
        "with on_meta():\n    nn.Linear(3, 4), nn.GRU(3, 4), nn.Embedding(3, 4)\n"
        "sys.exit('sympy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


class Own(nn.Module):
    """A network of somebody's own, with layers that `uniform_` does not know."""

    def __init__(self, *, batch_norm=False, buffer=None, norm=nn.GroupNorm):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), norm(2, 4)
        self.batch = nn.BatchNorm1d(4) if batch_norm else None
        if buffer is not None:
            self.register_buffer("table", buffer, persistent=False)

    def reset_parameters(self, generator, init):
        """Initialise the layers that `uniform_` or `orthogonal_` knows."""
        if init == "uniform":
            uniform_(self, generator)
        else:
            orthogonal_(self, 1.0, generator)


@pytest.mark.parametrize("init", ["uniform", "orthogonal"])
def test_a_value_that_nothing_initialises_is_refused_by_name(init):
    with on_meta():
        complete, batch_norm = Own(), Own(batch_norm=True)
        tables = [Own(buffer=torch.ones(2)), Own(buffer=torch.arange(2))]
    initialise(complete, 0, init)
    assert complete.norm.weight.tolist() == [1] * 4 and complete.norm.bias.tolist() == [0] * 4
    for network, name in ((batch_norm, "batch.weight"), *((table, "table") for table in tables)):
        with pytest.raises(ValueError, match=f"^Own: {name} is not initialised: "):
            initialise(network, 0, init)
