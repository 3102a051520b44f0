"""What a failure that nobody expected means for the person who meets it."""

from __future__ import annotations

import sys

from memory.errors import ExpectedError, MemoryBudgetError, describe


class BugError(ExpectedError):
    """Report a fault of the program itself: the only failure that ends with 1."""

    exit_code = 1


def out_of_memory(error: BaseException) -> MemoryBudgetError | None:
    """Return the refusal that fits when memory ran out, with what there is; None otherwise."""
    if not (isinstance(error, MemoryError) or _is_torchs(error)):
        return None
    from memory.budget import plan_line

    return MemoryBudgetError(
        f"memory ran out ({describe(error)}); {plan_line({}, None)}: make the replay, the "
        "rollout, the batch or the network smaller, or use fewer environments"
    )


def _is_torchs(error: BaseException) -> bool:
    # Without torch in memory no error is torch's; importing it here would take seconds.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # The host's allocator has no type of its own.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
