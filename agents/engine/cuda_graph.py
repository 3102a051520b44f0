"""Updates captured as CUDA graphs: one launch per step."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from steadyrl.agents.engine.all_reduce import AllReduceStep
from steadyrl.agents.engine.direct import DirectEngine, DirectStep
from steadyrl.agents.engine.engine import StepParts, TrainStep
from steadyrl.agents.learner.loss_spec import Tensors
from steadyrl.core.cuda_graph import CudaGraphed


class CudaGraphEngine(DirectEngine):
    """Replay eager steps as CUDA graphs."""

    captures = True

    @override
    def train_step(self, parts: StepParts) -> TrainStep:
        return CudaGraphStep(parts)


class CudaGraphStep(DirectStep):
    """A step that is one CUDA graph; with several ranks two, and the all-reduce between."""

    fixed_inputs = True

    @override
    def build_run(self) -> Callable[..., Tensors]:
        if self.comm.is_single:
            return CudaGraphed(self.whole)
        gradient, update = CudaGraphed(self.gradient), CudaGraphed(self.update)
        return AllReduceStep(gradient, update, self.comm, self.stop)
