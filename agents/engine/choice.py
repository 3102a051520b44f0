"""The engine of a mode."""

from __future__ import annotations

from steadyrl.agents.engine.cuda_graph import CudaGraphEngine
from steadyrl.agents.engine.direct import DirectEngine
from steadyrl.agents.engine.eager import EagerEngine
from steadyrl.agents.engine.engine import Engine, Mode
from steadyrl.agents.engine.inductor import InductorEngine
from steadyrl.core.gates.reference import reference_only

ENGINES: dict[Mode, type[Engine]] = {
    "eager": DirectEngine,
    "compiled": InductorEngine,
    "cudagraph": CudaGraphEngine,
}


def engine_of(chosen: Mode | Engine) -> Engine:
    """Return the engine of a mode, or the one given; with STEADYRL_ENGINE=eager the reference."""
    if not isinstance(chosen, str):
        return chosen
    return EagerEngine() if reference_only() else ENGINES[chosen]()
