"""The switch that lets the reference engine run everything."""

from __future__ import annotations

import os

from steadyrl.core.errors import SettingError

SWITCH = "STEADYRL_ENGINE"


def reference_only() -> bool:
    """Return whether all runs by the reference alone: no compiler, no machine code for acting."""
    chosen = os.environ.get(SWITCH) or "auto"
    if chosen not in ("auto", "eager"):
        raise SettingError(SWITCH, chosen, "must be eager, or auto as it is where it is unset")
    return chosen == "eager"
