"""Rows of a policy's best actions as machine code: how evaluations play most of their episodes."""

from __future__ import annotations

from typing import Any

from steadyrl.agents.engine.cpu.policy import Drawing, choose
from steadyrl.core.jit import Held, call, compiled
from steadyrl.envs.types import NON_FINITE, OBS_SLOT, STOP, BlockResult, StepMany


@compiled
def go_on(advance: int, boxed_context: Any, held: Any) -> None:
    """Make rows until the environments say that it is over."""
    context, drawing = boxed_context.inside, held.inside
    counters = context.counters
    while True:
        call(advance, (context,))
        if counters[NON_FINITE] or counters[STOP]:
            return
        choose(drawing, context.observations[counters[OBS_SLOT]], context.flat_action)


@compiled
def hold(drawing: Any) -> Any:
    """Hand over what `go_on` works on."""
    return Held(drawing)


class Chooser:
    """Takes the best actions row after row, by machine code."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self._held: Any = None

    def __call__(self, run: StepMany, steps: int) -> BlockResult:
        """Go on from the actions that were sent."""
        if self._held is None:
            self._held = hold(self._drawing)
        return run(go_on, steps, self._held)
