"""Products of matrices by oneDNN, in graphs for processors that torch's own library uses by half.

torch asks Intel's MKL, which leaves the AVX-512 units of AMD's processors idle; oneDNN, which comes
with torch too, writes code for them. Its call costs some microseconds more: only large ones pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WORTHWHILE = 1_200_000  # multiplications
SPACE, OPERATOR = "steadyrl", "product"
PROCESSOR = Path("/proc/cpuinfo")


@cache
def faster_here() -> bool:
    """Whether this processor has units that oneDNN uses and MKL does not."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not (wide and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        return "AuthenticAMD" in PROCESSOR.read_text()
    except OSError:
        return False


def quicker_for(numbers: Tensor, multiplications: int) -> bool:
    """Whether oneDNN should make so large a product of such numbers."""
    fits = numbers.device.type == "cpu" and numbers.dtype == torch.float32
    return fits and multiplications >= WORTHWHILE and faster_here()


def pays(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN should multiply these."""
    return left.dtype == right.dtype and quicker_for(left, left.numel() * right.shape[1])


@cache
def _library() -> torch.library.Library:
    """Return what holds the operator, by torch's plain way: its newer one loads its compiler."""

    def multiply(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        return left @ right if bias is None else torch.addmm(bias, left, right)

    library = torch.library.Library(SPACE, "FRAGMENT")
    library.define(f"{OPERATOR}(Tensor left, Tensor right, Tensor? bias) -> Tensor")
    library.impl(OPERATOR, multiply, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{SPACE}::{OPERATOR}", multiply, lib=library)
    return library


@cache
def operator() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return left @ right + bias as an operator of its own, which no compiler pass rewrites."""
    _library()
    told: Callable[[Tensor, Tensor, Tensor | None], Tensor] = torch.ops.steadyrl.product.default
    return told


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right, plus a bias for each column: in a graph, one call of oneDNN."""
    return operator()(left, right, bias)


def products(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of some pairs of matrices."""
    pairs = zip(left.unbind(), right.unbind(), strict=True)
    return torch.stack([product(one, other) for one, other in pairs])


@contextmanager
def compilable() -> Iterator[None]:
    """Let the compiler make such calls; its own way to oneDNN is for constant matrices only."""
    if not faster_here():  # nothing asks for them: the compiler is left as it is
        yield
        return
    from torch._inductor import mkldnn_ir
    from torch._inductor.ir import ExternKernel, FixedLayout, TensorBox
    from torch._inductor.lowering import lowerings

    def lowered(left: Any, right: Any, bias: Any) -> Any:
        left = ExternKernel.require_contiguous(ExternKernel.realize_input(left))
        # oneDNN takes the second matrix transposed, with its numbers in whatever order.
        turned = lowerings[torch.ops.aten.permute.default](right, [1, 0])
        inputs = [left, ExternKernel.realize_input(turned)]
        constants: list[Any] = ["none", [-1], ""]
        if bias is None:
            constants.insert(0, None)
        else:
            inputs.append(ExternKernel.require_contiguous(ExternKernel.realize_input(bias)))
        size = [left.get_size()[0], right.get_size()[1]]
        layout = FixedLayout(device=left.get_device(), dtype=left.get_dtype(), size=size)
        node = mkldnn_ir.LinearUnary(layout=layout, inputs=inputs, constant_args=constants)
        return TensorBox.create(mkldnn_ir._create_output_node(node))

    lowerings[operator()] = lowered
    try:
        yield
    finally:
        del lowerings[operator()]
