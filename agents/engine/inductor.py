"""Updates compiled to one graph by torch's Inductor, with a fallback where that fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from steadyrl.agents.engine.graphs.compile_directory import in_private_directory
from steadyrl.agents.engine.graphs.graph_cache import host_code
from steadyrl.core.cuda_graph import flatten
from steadyrl.core.errors import describe, one_line
from steadyrl.core.gates.gate import Unsupported
from steadyrl.core.gates.torch_private import COMPILER, TORCH

log = logging.getLogger("steadyrl")


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

    def build(self, args: tuple[Any, ...]) -> None:
        """Compile for arguments of these shapes; the arguments are not changed."""
        log.info("compiling %s ...", self._name)
        begin = time.perf_counter()
        try:
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
    with in_private_directory():
        compile_graph = TORCH[f"{COMPILER}.compile"]
        run: Callable[..., Any] = compile_graph(graph, list(inputs))
        # Compilation happens at the first call: make it here, on copies.
        run(*(tensor.clone() for tensor in inputs))
    return lambda tensors: run(*tensors)
