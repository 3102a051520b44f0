"""The engine of a mode, or of the settings of an algorithm."""

from __future__ import annotations

import torch

from steadyrl.agents.engine.cuda_graph import CudaGraphEngine
from steadyrl.agents.engine.direct import DirectEngine
from steadyrl.agents.engine.eager import EagerEngine
from steadyrl.agents.engine.engine import Engine, Mode, Setting, compile_mode
from steadyrl.agents.engine.inductor import InductorEngine
from steadyrl.agents.networks.settings import is_large_image
from steadyrl.core.gates.reference import reference_only
from steadyrl.envs.types import EnvSpec

ENGINES: dict[Mode, type[Engine]] = {
    "direct": DirectEngine,  # the reference's operators, with less around each
    "compiled": InductorEngine,
    "cudagraph": CudaGraphEngine,
}


def engine_of(chosen: Mode | Engine) -> Engine:
    """Return the engine of a mode, or the one given; with STEADYRL_ENGINE=eager the reference."""
    if not isinstance(chosen, str):
        return chosen
    return EagerEngine() if reference_only() else ENGINES[chosen]()


def build_engine(
    setting: Setting, expected_updates: int, spec: EnvSpec, device: torch.device
) -> Engine:
    """Select by `agent.compile` how updates run: directly, compiled, or as a CUDA graph."""
    large = is_large_image(spec.unmasked_shape)
    return engine_of(compile_mode(setting, device, expected_updates, large_images=large))
