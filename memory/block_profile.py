"""Profile of the training loop's blocks: memory and time (`memory.profile=true`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from steadyrl.core.history import History
from steadyrl.memory.memory_scope import MemoryScope, ScopeReport
from steadyrl.memory.process import MB
from steadyrl.memory.settings import MemorySettings
from steadyrl.memory.tensors import find_tensors_with_graph


class _Block:
    """Totals of one block since the last table."""

    def __init__(self, passes_kept: int) -> None:
        self.milliseconds = History(passes_kept)
        self.clear()

    def clear(self) -> None:
        self.passes = self.host_taken = self.host_kept = self.device_taken = self.device_kept = 0
        self.milliseconds.clear()

    def add(self, report: ScopeReport) -> None:
        self.passes += 1
        self.milliseconds.append(report.seconds * 1e3)
        self.host_taken = max(self.host_taken, report.host.taken)
        self.host_kept += report.host.kept
        self.device_taken = max(self.device_taken, report.device.taken)
        self.device_kept += report.device.kept


class Profile:
    """Totals of all blocks by name; times are means over the newest passes."""

    def __init__(
        self,
        device: torch.device,
        settings: MemorySettings,
        holders: Mapping[str, Any],
    ) -> None:
        """Measure on `device`; search `holders` for tensors that keep an autograd graph."""
        self._device, self._settings, self._holders = device, settings, holders
        self._blocks: dict[str, _Block] = {}

    def wrap(self, block: str, methods: Sequence[tuple[Any, str]]) -> None:
        """Measure every call of these methods, each an owner and a name, as part of a block."""
        for owner, name in methods:
            setattr(owner, name, self._measured(block, getattr(owner, name)))

    def _measured(self, block: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.measure(block):
                return method(*args, **kwargs)

        return measured

    def measure(self, name: str) -> MemoryScope:
        """Return a memory scope that reports to this profile."""
        return MemoryScope(name, device=self._device, report=self._add)

    def table(self, title: str) -> str:
        """Return the table since the last call and tensors that keep a graph; reset the totals."""
        lines = [f"memory profile, {title}; MB on the host (and the device)"]
        lines.append(f"{'block':<10}{'passes':>9}{'ms/pass':>10}{'most taken':>22}{'kept':>22}")
        for name, block in self._blocks.items():
            taken = _pair(block.host_taken, block.device_taken)
            kept = _pair(block.host_kept, block.device_kept)
            lines.append(
                f"{name:<10}{block.passes:>9,}{block.milliseconds.mean:>10.3f}{taken:>22}{kept:>22}"
            )
            block.clear()
        graphs = find_tensors_with_graph(**self._holders) or ["none"]
        return "\n".join([*lines, "tensors that keep their graph:", *(f"  {g}" for g in graphs)])

    def _add(self, report: ScopeReport) -> None:
        block = self._blocks.get(report.name)
        if block is None:
            settings = self._settings
            kept = settings.collect_times if report.name == "collect" else settings.step_times
            block = self._blocks[report.name] = _Block(kept)
        block.add(report)


def _pair(host: int, device: int) -> str:
    return f"{host / MB:+,.2f} ({device / MB:+,.2f})"
