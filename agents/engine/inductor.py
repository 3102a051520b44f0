"""Updates compiled to one graph by torch's Inductor, with a fallback where that fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.engine.all_reduce import AllReduceStep
from steadyrl.agents.engine.direct import DirectEngine, DirectStep, undone_unless
from steadyrl.agents.engine.engine import Evaluator, StepParts, TrainStep
from steadyrl.agents.engine.graphs.compile_directory import in_private_directory
from steadyrl.agents.engine.graphs.compiler_memory import compiler_within_memory
from steadyrl.agents.engine.graphs.graph_cache import COMPILING, host_code
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.learner.loss_spec import Tensors
from steadyrl.agents.learner.minibatch import merge, microbatches, weighted_means
from steadyrl.agents.learner.optimizers.adam import clip_grad_norm_
from steadyrl.agents.learner.optimizers.optimizer import State
from steadyrl.core.clock import doing
from steadyrl.core.cuda_graph import flatten, host_sees
from steadyrl.core.errors import describe, one_line
from steadyrl.core.gates.gate import Unsupported
from steadyrl.core.gates.torch_private import COMPILER, TORCH

log = logging.getLogger("steadyrl")


class InductorEngine(DirectEngine):
    """Run steps as graphs that Inductor compiles."""

    traces = True

    @override
    def train_step(self, parts: StepParts) -> TrainStep:
        return InductorStep(parts)

    @override
    def evaluator(
        self, function: Callable[..., Any], network: FlatNetwork, stop: Callable[[], Stop]
    ) -> Evaluator | None:
        if not host_sees(network.weights):  # on devices it has not been measured
            return None
        graph = CompiledGraph(function, function, "the network")

        def run(*arguments: Any) -> Any:
            if not graph.built:
                with stop().interruptible(), torch.inference_mode(False):
                    graph.build(arguments)
            return graph(*arguments)

        return run


class InductorStep(DirectStep):
    """A step that is one compiled graph; with several ranks two, and the all-reduce between."""

    fixed_inputs = is_one_call = True
    ready = False  # the next step compiles first

    @override
    def build_run(self) -> Callable[..., Tensors]:
        # Batches are only read: with `index_batches` it is a whole rollout, too large to copy.
        if self.comm.is_single:
            return CompiledGraph(self.pure, self.whole, only_read=(3,))
        gradient = CompiledGraph(self.pure_gradient, self.gradient, only_read=(2,))
        update = CompiledGraph(self.pure_update, self.update)
        return AllReduceStep(gradient, update, self.comm, self.stop)

    @override
    def prepare(self, *inputs: Any) -> None:
        arguments = self.arguments(*inputs)
        if isinstance(self.run, CompiledGraph):
            self.run.build(arguments)
        elif isinstance(self.run, AllReduceStep):
            with self.comm.long_operation():
                build_halves(self.run, arguments)
                self._agree(self.run)

    def _agree(self, step: AllReduceStep) -> None:
        """Collective: compile on all ranks or on none: their weights must stay the same bits."""
        graphs = [step.gradient, step.update]
        compiled = all(isinstance(each, CompiledGraph) and each.compiled for each in graphs)
        if all(self.comm.all_gather(compiled)):
            return
        for graph in graphs:
            assert isinstance(graph, CompiledGraph)
            graph.abandon()
        if compiled:
            log.warning("another process cannot compile its updates: running eagerly as it does")

    def pure(
        self, weights: Tensors, state: State, scalars: Tensors, batch: Any, weight: Tensor
    ) -> Tensors:
        """Compute the gradient and apply it, as one pure function of tensors."""
        gradient, means, *aux = self.pure_gradient(weights, scalars, batch, weight)
        return self.pure_update(weights[0], gradient, state, scalars[0], means), *aux

    def pure_gradient(
        self, weights: Tensors, scalars: Tensors, batch: Any, weight: Tensor
    ) -> Tensors:
        """Return gradient [P], metrics [K] and aux outputs [B] of these weights."""
        online, *frozen = weights
        gradients: list[Tensor] = []
        results = []
        for microbatch, part in microbatches(self.spec, batch, weight):
            leaf = online.detach().requires_grad_()
            pairs = zip(self.networks, (leaf, *frozen), strict=True)
            networks = [network.function(values) for network, values in pairs]
            with torch.enable_grad():
                losses = self.spec.loss(*networks, microbatch, *scalars[1:])
                gradients += torch.autograd.grad(torch.dot(losses.loss, part), leaf)
            results.append(weighted_means(losses, part))
        return sum(gradients[1:], gradients[0]), *merge(results)

    @torch.no_grad()
    def pure_update(
        self, weights: Tensor, gradient: Tensor, state: State, rate: Tensor, means: Tensor
    ) -> Tensor:
        """Do what `update` does in operations that fuse."""
        norm = clip_grad_norm_(gradient, self.spec.max_grad_norm, read_on_host=False)
        metrics = torch.cat((means, norm.unsqueeze(0)))
        with undone_unless(self.spec.is_within_limit(means), weights, *state):
            self.optimizer.traceable_step_(weights, gradient, state, rate)
        return metrics


def build_halves(step: AllReduceStep, arguments: tuple[Any, ...]) -> None:
    """Compile both graphs for inputs of these shapes; the inputs are not changed."""
    weights, state, scalars, batch, sample_weight = arguments
    assert isinstance(step.gradient, CompiledGraph) and isinstance(step.update, CompiledGraph)
    step.gradient.build((weights, scalars, batch, sample_weight))
    # Only shapes matter: the gradient of copies of the weights will do.
    copies = tuple(network.clone() for network in weights)
    gradient, means, *_ = step.gradient(copies, scalars, batch, sample_weight)
    step.update.build((weights[0], gradient, state, scalars[0], means))


class CompiledGraph:
    """A function that is compiled to one graph at its first call, or falls back to eager mode.

    It is traced by running it once on copies instead of analysing its bytecode: compilation
    takes a third of the time, and calls check no guards. All arguments are tensors of fixed
    shapes. Other tensors that it reads become graph inputs, so that their changes are seen.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        fallback: Callable[..., Any],
        name: str = "the update",
        *,
        only_read: Sequence[int] = (),
    ) -> None:
        """Take a function, its eager equivalent, and the indices of arguments it only reads.

        Those are not copied for tracing.
        """
        self._function = function
        self._fallback = fallback
        self._name, self._only_read = name, only_read
        self._run: Callable[[list[Tensor]], Any] | None = None
        self._failed = False
        self._captured: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        """Run the graph; build it first if necessary."""
        if not self.built:
            self.build(args)
        if self._run is None:
            return self._fallback(*args)
        return self._run(flatten(args) + self._captured)

    @property
    def built(self) -> bool:
        """Whether compilation has been attempted."""
        return self._failed or self._run is not None

    @property
    def compiled(self) -> bool:
        """Whether there is a graph to run."""
        return self._run is not None

    def abandon(self) -> None:
        """Run eagerly from now on."""
        self._run, self._failed = None, True

    def build(self, args: tuple[Any, ...]) -> None:
        """Compile for arguments of these shapes; the arguments are not changed."""
        log.info("compiling %s ...", self._name)
        begin = time.perf_counter()
        try:
            with doing(f"preparing {self._name}", logged=True):
                self._run = self._compile(args)
            log.info("compiled in %.1f s", time.perf_counter() - begin)
        except Unsupported as missing:
            TORCH.log_once(missing)
            self._failed = True
        # Of the compiler, or of the function, which then fails eagerly too.
        except Exception as error:
            why = reason(error)
            log.warning("%s cannot be compiled here, running eagerly: %s", self._name, why)
            self._failed = True

    def _compile(self, args: tuple[Any, ...]) -> Callable[[list[Tensor]], Any]:
        TORCH.require("trace")
        from steadyrl.agents.engine.graphs.trace import trace  # built on private names

        single = False

        def function(*inputs: Any) -> tuple[Any, ...]:
            nonlocal single
            outputs = self._function(*inputs)
            single = isinstance(outputs, Tensor)  # a graph returns a tuple
            return (outputs,) if single else outputs

        graph, self._captured = trace(function, args, self._only_read)
        inputs = flatten(args) + self._captured
        code = host_code if inputs[0].device.type == "cpu" else device_code
        run = code(graph, inputs)
        return (lambda tensors: run(tensors)[0]) if single else run


def reason(error: Exception) -> str:
    """Return why compilation failed, in one line: the compiler's error, not its command."""
    printed = str(error).partition("\nOutput:\n")[2]
    errors = [line for line in printed.splitlines() if "error" in line]
    return one_line(errors[0]) if errors else describe(error)


def device_code(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    """Return a compiled `graph` for tensors like these on a device."""
    with compiler_within_memory(), in_private_directory(), doing(COMPILING, logged=True):
        compile_graph = TORCH[f"{COMPILER}.compile"]
        run: Callable[..., Any] = compile_graph(graph, list(inputs))
        # Compilation happens at the first call: make it here, on copies.
        run(*(tensor.clone() for tensor in inputs))
    return lambda tensors: run(*tensors)
