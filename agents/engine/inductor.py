"""Updates compiled to one graph by torch's Inductor, and what runs where that fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from steadyrl.agents.engine.graphs.compile_directory import in_private_directory
from steadyrl.agents.engine.graphs.graph_cache import host_code
from steadyrl.agents.engine.graphs.trace import trace
from steadyrl.core.cuda_graph import flatten
from steadyrl.core.errors import describe, one_line

log = logging.getLogger("steadyrl")


class CompiledGraph:
    """A function that becomes one graph of kernels at its first call, or stays eager.

    It is traced by running it once on copies, not by reading its bytecode: that compiles in a
    third of the time, and a call has no guards to check. All arguments are tensors whose shapes
    never change; tensors it reads besides are made arguments too, so that their changes are seen.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        fallback: Callable[..., Any],
        name: str = "the update",
        *,
        only_read: Sequence[int] = (),
    ) -> None:
        """Take a function, what computes the same eagerly, and which arguments it only reads.

        These are not copied for the trace.
        """
        self._function = function
        self._fallback = fallback
        self._name, self._only_read = name, only_read
        self._run: Callable[[list[Tensor]], Any] | None = None
        self._failed = False
        self._captured: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        """Run the graph, once it is built."""
        if not self.built:
            self.build(args)
        if self._run is None:
            return self._fallback(*args)
        return self._run(flatten(args) + self._captured)

    @property
    def built(self) -> bool:
        """Whether it runs as it always will."""
        return self._failed or self._run is not None

    def build(self, args: tuple[Any, ...]) -> None:
        """Compile for arguments like these, which are left as they are."""
        log.info("compiling %s ...", self._name)
        begin = time.perf_counter()
        try:
            self._run = self._compile(args)
            log.info("compiled in %.1f s", time.perf_counter() - begin)
        # The compiler's, or of what it compiles, which then fails eagerly.
        except Exception as error:
            why = reason(error)
            log.warning("%s cannot be compiled here, running eagerly: %s", self._name, why)
            self._failed = True

    def _compile(self, args: tuple[Any, ...]) -> Callable[[list[Tensor]], Any]:
        alone = False

        def function(*given: Any) -> tuple[Any, ...]:
            nonlocal alone
            found = self._function(*given)
            alone = isinstance(found, Tensor)  # a graph returns several
            return (found,) if alone else found

        graph, self._captured = trace(function, args, self._only_read)
        inputs = flatten(args) + self._captured
        code = host_code if inputs[0].device.type == "cpu" else device_code
        run = code(graph, inputs)
        return (lambda tensors: run(tensors)[0]) if alone else run


def reason(error: Exception) -> str:
    """Return in one line why nothing was compiled: a compiler's own error, not its command."""
    printed = str(error).partition("\nOutput:\n")[2]
    errors = [line for line in printed.splitlines() if "error" in line]
    return one_line(errors[0]) if errors else describe(error)


def device_code(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    """Return what computes `graph` on a device, of tensors like these."""
    with in_private_directory():
        from torch._inductor import compile as compile_graph  # slow to import

        run: Callable[..., Any] = compile_graph(graph, list(inputs))
        # Compilation itself happens at the first call, which must not count as an update.
        run(*(tensor.clone() for tensor in inputs))
    return lambda tensors: run(*tensors)
