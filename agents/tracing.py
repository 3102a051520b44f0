"""How a function of tensors becomes a graph, and what is written otherwise in it to be fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agents.onednn_products import pays, product, products
from memory.recording import flatten


def once(number: Tensor) -> Tensor:
    """Return a number [] that a graph computes once, not again for all whom it is multiplied with.

    A compiler writes arithmetic into every loop that needs it, but keeps what a reduction gave.
    """
    return number.expand(16).amax()


def rebuild(leaves: tuple[Any, ...], like: tuple[Any, ...]) -> list[Any]:
    """Undo `flatten`, with the structure of `like`."""
    rest = iter(leaves)

    def taken(arg: Any) -> Any:
        if not isinstance(arg, tuple):
            return next(rest)
        items = [next(rest) for _ in arg]
        return type(arg)(*items) if hasattr(arg, "_fields") else tuple(items)

    return [taken(arg) for arg in like]


def traced(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Return a graph of `function`, and the tensors it takes after its flattened arguments."""
    from torch.fx.experimental.proxy_tensor import make_fx

    copies = (leaf.detach().clone() for leaf in flatten(args))
    rewritten: dict[Any, Callable[..., Any]] = {
        torch.ops.aten.mm.default: _mm,
        torch.ops.aten.addmm.default: _addmm,
        torch.ops.aten.bmm.default: _bmm,
        torch.ops.aten.baddbmm.default: _baddbmm,
    }
    graph = make_fx(lambda *flat: function(*rebuild(flat, args)), rewritten)(*copies)
    return graph, _lift(graph)


def _lift(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Make tensors that the graph holds its last arguments, and return them."""
    captured: list[Tensor] = []
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        tensor = getattr(graph, node.target)
        if not isinstance(tensor, Tensor):
            continue
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"captured_{len(captured)}")
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
        captured.append(tensor)
    graph.recompile()
    return captured


# Products that are so narrow are sums in a loop with what is done before and after; the library
# takes longer to be called, but not longer than a loop that jumps from row to row of a matrix that
# lies transposed. Those with few columns it computes several times as fast transposed.
NARROW, FEW = 2, 16
SHORT = 8  # sums of so few are written out where they are needed
TWINS = 2  # a pair of networks may be written out, product by product


def _mm(left: Tensor, right: Tensor) -> Any:
    rows, inner, columns = left.shape[0], *right.shape
    narrow = min(rows, inner, columns) <= NARROW
    if columns <= FEW < rows and (not narrow or left.stride(1) != 1):
        return (right.t() @ left.t()).t()
    if narrow and (right.stride(1) == 1 or inner > NARROW or columns <= NARROW):
        return (left.unsqueeze(2) * right.unsqueeze(0)).sum(1)
    return product(left, right) if pays(left, right) else NotImplemented  # as it is


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Any:
    if bias.dim() == 1 and pays(left, right):
        return product(left, right, bias)
    found = _mm(left, right)
    found = torch.mm(left, right) if found is NotImplemented else found
    # As below; of a plain sum with a product the compiler would make one call of both again.
    return (found.unsqueeze(0) + bias).squeeze(0)


def _bmm(left: Tensor, right: Tensor) -> Any:
    if left.shape[2] <= SHORT:
        return (left.unsqueeze(3) * right.unsqueeze(1)).sum(2)
    pay = len(left) <= TWINS and pays(left[0], right[0])
    return products(left, right) if pay else NotImplemented


def _baddbmm(bias: Tensor, left: Tensor, right: Tensor) -> Any:
    found = _bmm(left, right)
    # The library would first write the bias to every row of the result; so it costs nothing.
    return (torch.bmm(left, right) if found is NotImplemented else found) + bias
