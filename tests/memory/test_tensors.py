import functools
import weakref
from collections import deque
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from steadyrl.memory.tensors import (
    find_tensors_with_graph,
    has_graph,
    kind_of,
    live_tensors,
    reachable_tensors,
    storage_bytes,
)


def with_graph():
    return torch.ones(3, requires_grad=True) * 2


def graphs_in(root):
    """Return the lines about tensors with a graph that a root keeps alive."""
    return [line for line in find_tensors_with_graph(root=root) if line.startswith("root")]


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept):
        self.kept = kept


@dataclass
class Plain:
    kept: object


HOLDERS = {
    "attribute": Plain,
    "slot": Slotted,
    "list": lambda t: [1, [t]],
    "tuple": lambda t: (t,),
    "dict": lambda t: {"a": {"b": t}},
    "deque": lambda t: deque([t]),
    "closure": lambda t: lambda: t,
    "default": lambda t: lambda x=t: x,
    "partial": lambda t: functools.partial(print, t),
    "bound method": lambda t: Plain(t).__eq__,
    "generator": lambda t: (t for _ in range(2)),
    "deep": lambda t: functools.reduce(lambda inner, _: [inner], range(5000), t),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_tensors_with_graph_are_found_in_every_holder(kind):
    holder = HOLDERS[kind](with_graph())
    assert graphs_in(holder) != []
    assert graphs_in(HOLDERS[kind](with_graph().detach())) == []


def test_the_path_to_a_tensor_is_readable():
    holder = Plain({"losses": [Slotted(with_graph())]})
    (line,) = graphs_in(holder)
    path = "root.kept['losses'][0].kept"
    assert line == f"{path}: float32[3] on cpu with their graph, 12 bytes, 1 references"


def test_tensors_with_graph_are_listed_by_path_or_counted():
    assert find_tensors_with_graph(agent=Plain(torch.ones(3))) == []
    holder = Plain([with_graph() for _ in range(7)])
    hidden = [with_graph() for _ in range(3)]
    lines = find_tensors_with_graph(agent=holder)
    assert lines[0] == ("agent.kept[0]: float32[3] on cpu with their graph, 12 bytes, 1 references")
    assert lines[5:] == ["2 more in agent", "3 elsewhere: float32[3] on cpu with their graph"]
    assert len(hidden) == 3
    held_twice = [with_graph()] * 2
    (line,) = (
        line for line in find_tensors_with_graph(agent=held_twice) if line.startswith("agent[0]")
    )
    assert line.endswith(" 2 references")


def test_weights_and_gradients_are_reachable_without_graph():
    network = nn.Linear(2, 2)
    network(torch.ones(2)).sum().backward()
    assert graphs_in(network) == []
    found = [tensor for _, tensor in reachable_tensors(network, "network")]
    for parameter in network.parameters():
        assert any(tensor is parameter for tensor in found)
        assert any(tensor is parameter.grad for tensor in found)


def test_module_globals_are_not_searched():
    global_tensor = torch.zeros(1)
    globals()["_global_tensor"] = global_tensor
    try:
        holder = [test_the_path_to_a_tensor_is_readable, Plain, Plain(1).__eq__]
        assert list(reachable_tensors(holder, "holder")) == []
    finally:
        del globals()["_global_tensor"]


def test_an_update_and_its_metrics_keep_no_graph():
    from steadyrl.core.metrics import MetricAccumulator, record

    network = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(network.parameters())
    accumulator = MetricAccumulator()
    for _ in range(3):
        loss = network(torch.ones(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        accumulator.add(record(["loss"], loss))
    assert graphs_in([network, optimizer, accumulator]) == []


def test_kind_and_storage_of_tensors():
    base = torch.zeros(100, 10, dtype=torch.float64)
    view = base[0]
    assert storage_bytes(view) == 8000
    assert kind_of(view) == ((10,), torch.float64, "cpu", False)
    assert has_graph(with_graph()) and not has_graph(torch.ones(1, requires_grad=True))
    assert storage_bytes(torch.ones(3).to_sparse()) == 0


def test_live_tensors_count_shared_storage_once():
    before = live_tensors()
    base = torch.zeros(12_345)
    views = [base[:5] for _ in range(7)]
    now = live_tensors()
    assert now.number - before.number == 8
    assert now.nbytes - before.nbytes == 4 * 12_345
    more = now.kinds - before.kinds
    assert more[kind_of(views[0])] == 7


def test_weak_proxies_of_what_is_gone_are_followed_no_further():
    class Gone:
        pass

    holder = {"proxy": weakref.proxy(Gone()), "tensor": torch.ones(2)}
    found = [path for path, _ in reachable_tensors(holder, "holder")]
    assert found == ["holder['tensor']"]
