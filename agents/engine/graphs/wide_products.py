"""Matrix products in graphs, for processors that torch's default library does not use fully.

torch calls Intel's MKL, which does not use AVX-512 on AMD processors. oneDNN, also part of torch,
does, but calling it takes longer than a small product. So graphs contain code of their own there
(product.h): twice as fast as either for small products, as fast as oneDNN for large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SPACE, OPERATOR = "steadyrl", "product"

PROCESSOR = Path("/proc/cpuinfo")

CODE = Path(__file__).with_name("product.h")
TEMPLATE = Path(__file__).with_name("product_template.py")  # of the calls of that code


@cache
def faster_here() -> bool:
    """Return whether this processor has AVX-512 units that MKL does not use."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not (wide and torch.backends.mkl.is_available()):
        return False
    try:
        return "AuthenticAMD" in PROCESSOR.read_text()
    except OSError:
        return False


def is_supported(*matrices: Tensor) -> bool:
    """Return whether graphs multiply these tensors with their own code."""
    fit = all(each.device.type == "cpu" and each.dtype == torch.float32 for each in matrices)
    return fit and faster_here()


@cache
def _library() -> torch.library.Library:
    """Return the library with the operator; torch's newer API would import the compiler."""
    library = torch.library.Library(SPACE, "FRAGMENT")
    library.define(f"{OPERATOR}(Tensor left, Tensor right) -> Tensor")
    library.impl(OPERATOR, torch.matmul, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{SPACE}::{OPERATOR}", torch.matmul, lib=library)
    return library


@cache
def operator() -> Callable[[Tensor, Tensor], Tensor]:
    """Return left @ right as an opaque operator, which no compiler pass rewrites."""
    _library()
    product: Callable[[Tensor, Tensor], Tensor] = torch.ops.steadyrl.product.default
    return product


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, for matrices or batches of them, as an operator of its own."""
    return operator()(left, right)
