"""Whether numbers below 1e-38 (subnormal ones) count as 0: read and set for the calling thread."""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import NamedTuple


class _Control(NamedTuple):
    """Where C's `fenv_t` holds the register that says so, and which of its bits do."""

    offset: int  # bytes
    bits: int


# x86: MXCSR behind the state of x87, its bits FTZ and DAZ; 64-bit Arm: FPCR, its bit FZ.
_CONTROLS = {
    "x86_64": _Control(28, 1 << 15 | 1 << 6),
    "aarch64": _Control(0, 1 << 24),
}
_LARGEST_STATE = 64  # bytes; `fenv_t` takes 32 and 8
_CONTROL = _CONTROLS.get(platform.machine()) if sys.platform == "linux" else None


def flushes_subnormals() -> bool:
    """Return whether subnormal numbers count as 0 in this thread; False where nobody knows."""
    if _CONTROL is None:
        return False
    _, _, register = _read(_CONTROL)
    return bool(register.value & _CONTROL.bits)


def flush_subnormals(flush: bool) -> None:
    """Let subnormal numbers count as 0 in this thread and those that it starts, or not.

    What `torch.set_flush_denormal` does, for processes that need not import torch.
    """
    if _CONTROL is None or flushes_subnormals() == flush:
        return
    library, state, register = _read(_CONTROL)
    register.value = register.value | _CONTROL.bits if flush else register.value & ~_CONTROL.bits
    library.fesetenv(state)


def _read(control: _Control) -> tuple[ctypes.CDLL, ctypes.Array[ctypes.c_char], ctypes.c_uint32]:
    """Return C's library, this thread's floating-point state, and the register in it."""
    library = ctypes.CDLL("libm.so.6")
    state = ctypes.create_string_buffer(_LARGEST_STATE)
    library.fegetenv(state)
    return library, state, ctypes.c_uint32.from_buffer(state, control.offset)
