"""The engine of a mode, and whether acting may be machine code."""

from __future__ import annotations

from steadyrl.agents.engine.cuda_graph import CudaGraphEngine
from steadyrl.agents.engine.direct import DirectEngine
from steadyrl.agents.engine.eager import EagerEngine
from steadyrl.agents.engine.engine import Engine, Mode, reference_only
from steadyrl.agents.engine.inductor import InductorEngine
from steadyrl.core.gates.numba_private import NUMBA

ENGINES: dict[Mode, type[Engine]] = {
    "eager": DirectEngine,
    "compiled": InductorEngine,
    "cudagraph": CudaGraphEngine,
}


def acts_in_machine_code() -> bool:
    """Return whether small networks on the host act as Numba's code, and play fused rollouts."""
    return not reference_only() and NUMBA.offers("products")


def engine_of(chosen: Mode | Engine) -> Engine:
    """Return the engine of a mode, or the one given; with STEADYRL_ENGINE=eager the reference."""
    if not isinstance(chosen, str):
        return chosen
    return EagerEngine() if reference_only() else ENGINES[chosen]()
