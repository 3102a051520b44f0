"""Trace a function of tensors to a graph, and rewrite operations in it for speed.

torch's own tracer imports the compiler (1 s), which cached graphs do not need. This one records the
operations while the function runs once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.engine.graphs.patches import Patches
from steadyrl.agents.engine.graphs.wide_products import is_supported, product
from steadyrl.agents.networks.activations import tracing
from steadyrl.core.cuda_graph import flatten
from steadyrl.core.gates.torch_private import BY_TENSOR, MODE, TORCH

TorchDispatchMode: Any = TORCH[MODE]


def rebuild(leaves: tuple[Any, ...], like: tuple[Any, ...]) -> list[Any]:
    """Undo `flatten`, with the structure of `like`."""
    rest = iter(leaves)

    def taken(arg: Any) -> Any:
        if not isinstance(arg, tuple):
            return next(rest)
        items = [next(rest) for _ in arg]
        return type(arg)(*items) if hasattr(arg, "_fields") else tuple(items)

    return [taken(arg) for arg in like]


def trace(
    function: Callable[..., Any], args: tuple[Any, ...], only_read: Sequence[int] = ()
) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Return a graph of `function`, and the captured tensors that follow its flattened inputs.

    The function runs on copies of its arguments, except those with indices in `only_read`.
    """
    copies: list[Tensor] = []
    for number, arg in enumerate(args):
        leaves = [leaf.detach() for leaf in flatten((arg,))]
        copies += leaves if number in only_read else [leaf.clone() for leaf in leaves]
    tracer = Tracer(copies, rewritten_by(Patches()))
    with tracing(), tracer:
        found = function(*rebuild(tuple(copies), args))
    return tracer.build_graph(found), tracer.captured


def rewritten_by(patches: Patches) -> dict[Any, Callable[..., Any]]:
    """Return what replaces torch's operations in graphs; NotImplemented leaves one as it is."""
    return {
        torch.ops.aten.mm.default: _mm,
        torch.ops.aten.addmm.default: _addmm,
        torch.ops.aten.bmm.default: _bmm,
        torch.ops.aten.baddbmm.default: _baddbmm,
        torch.ops.aten.convolution.default: patches.forward,
        torch.ops.aten.convolution_backward.default: patches.backward,
    }


class Tracer(TorchDispatchMode):  # type: ignore[misc]
    """Record every tensor operation while it is entered."""

    def __init__(self, inputs: list[Tensor], rewritten: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.captured: list[Tensor] = []  # tensors from outside, as inputs after the `inputs`
        self._graph = torch.fx.Graph()
        self._rewritten = rewritten
        # Weak keys: a further reference would make autograd copy a tensor instead of viewing it.
        self._nodes: MutableMapping[Tensor, torch.fx.Node] = TORCH[BY_TENSOR]()
        self._last: torch.fx.Node | None = None
        for place, tensor in enumerate(inputs):
            self._add_placeholder(f"arg{place}", tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False without importing torch's compiler, which the default does."""
        return False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # record the operations that it decomposes into
            rewrite = self._rewritten.get(func)
            found = NotImplemented if rewrite is None else rewrite(*args, **kwargs)
            if found is NotImplemented:
                found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        given = torch.fx.node.map_aggregate((args, kwargs), self._to_node)
        node = self._graph.call_function(func, *given)  # type: ignore[arg-type]
        found = func(*args, **kwargs)
        self._record(node, found)
        return found

    def build_graph(self, found: Any) -> torch.fx.GraphModule:
        """Return the graph with these outputs."""
        self._graph.output(torch.fx.node.map_aggregate(found, self._to_node))
        return torch.fx.GraphModule(torch.nn.Module(), self._graph)

    def _to_node(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value not in self._nodes:
            if value.grad_fn is not None:  # else it would be a constant
                raise RuntimeError("tracing did not see how a tensor was computed")
            self._add_placeholder(f"captured{len(self.captured)}", value)
            self.captured.append(value)
        return self._nodes[value]

    def _add_placeholder(self, name: str, tensor: Tensor) -> None:
        if self._last is None:
            node = self._graph.placeholder(name)
        else:
            with self._graph.inserting_after(self._last):
                node = self._graph.placeholder(name)
        self._last = node
        self._record(node, tensor)

    def _record(self, node: torch.fx.Node, found: Any) -> None:
        if isinstance(found, Tensor):
            node.meta["val"] = found.detach().to("meta")
            self._nodes[found] = node
        elif isinstance(found, tuple | list):
            for place, part in enumerate(found):
                self._record(self._graph.call_function(operator.getitem, (node, place)), part)


# Narrow products are written as sums, which fuse with the operations around them: a library call
# takes longer, except where the loop would stride over a transposed matrix. Products with few
# columns are several times as fast transposed.
NARROW, FEW = 2, 16

SHORT = 8  # batched products with inner dimensions up to this are written as sums


def _mm(left: Tensor, right: Tensor) -> Any:
    rows, inner, columns = left.shape[0], *right.shape
    narrow = min(rows, inner, columns) <= NARROW
    few = columns <= FEW < rows and (not narrow or left.stride(1) != 1)
    if narrow and not few and (right.stride(1) == 1 or inner > NARROW or columns <= NARROW):
        return (left.unsqueeze(2) * right.unsqueeze(0)).sum(1)
    if is_supported(left, right):
        return product(left, right)
    return torch.mm(right.t(), left.t()).t() if few else NotImplemented  # as it is


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Any:
    found = _mm(left, right)
    found = torch.mm(left, right) if found is NotImplemented else found
    # As below; the unsqueeze keeps the compiler from merging both into addmm again.
    return (found.unsqueeze(0) + bias).squeeze(0)


def _bmm(left: Tensor, right: Tensor) -> Any:
    if left.shape[2] <= SHORT:
        return (left.unsqueeze(3) * right.unsqueeze(1)).sum(2)
    return product(left, right) if is_supported(left, right) else NotImplemented


def _baddbmm(bias: Tensor, left: Tensor, right: Tensor) -> Any:
    found = _bmm(left, right)
    # The library would write the bias to every row first; as a sum it fuses into other loops.
    return (torch.bmm(left, right) if found is NotImplemented else found) + bias
