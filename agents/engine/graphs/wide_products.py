"""Products of matrices in graphs for processors that torch's own library uses by half.

torch asks Intel's MKL, which leaves the AVX-512 units of AMD's processors idle. oneDNN, which comes
with torch too, uses them, but a call of it takes longer than a small product. So graphs hold code
of their own there (product.h): twice as fast as either where small, as oneDNN where large.
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


@cache
def faster_here() -> bool:
    """Whether this processor has units that MKL does not use."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not (wide and torch.backends.mkl.is_available()):
        return False
    try:
        return "AuthenticAMD" in PROCESSOR.read_text()
    except OSError:
        return False


def is_supported(*matrices: Tensor) -> bool:
    """Whether graphs multiply such numbers by code of their own."""
    fit = all(each.device.type == "cpu" and each.dtype == torch.float32 for each in matrices)
    return fit and faster_here()


@cache
def _library() -> torch.library.Library:
    """Return what holds the operator, by torch's plain way: its newer one loads its compiler."""
    library = torch.library.Library(SPACE, "FRAGMENT")
    library.define(f"{OPERATOR}(Tensor left, Tensor right) -> Tensor")
    library.impl(OPERATOR, torch.matmul, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{SPACE}::{OPERATOR}", torch.matmul, lib=library)
    return library


@cache
def operator() -> Callable[[Tensor, Tensor], Tensor]:
    """Return left @ right as an operator of its own, which no compiler pass rewrites."""
    _library()
    told: Callable[[Tensor, Tensor], Tensor] = torch.ops.steadyrl.product.default
    return told


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, matrices or several of them [B, …]: in a graph, code of its own."""
    return operator()(left, right)
