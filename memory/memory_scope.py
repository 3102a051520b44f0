"""Measure a block of code: memory on host and device, objects that grew, and time."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

import psutil
import torch

from steadyrl.core.history import History
from steadyrl.memory.object_census import growth_report, take_census
from steadyrl.memory.process import MB, UNREADABLE, read_peak, read_rss, readable
from steadyrl.memory.settings import MemorySettings
from steadyrl.memory.tensors import find_tensors_with_graph

log = logging.getLogger("steadyrl")
P = ParamSpec("P")
R = TypeVar("R")


class MemoryUse(NamedTuple):
    """Bytes in use before a block, at its peak, and after it."""

    before: int
    peak: int
    after: int

    @property
    def taken(self) -> int:
        """Peak bytes above those before the block."""
        return self.peak - self.before

    @property
    def kept(self) -> int:
        """Bytes after the block minus those before; negative if it freed memory."""
        return self.after - self.before


class ScopeReport(NamedTuple):
    """Measurement of one pass through a block."""

    name: str
    seconds: float
    host: MemoryUse
    device: MemoryUse
    grown: tuple[str, ...] = ()  # lines about tensors and objects that grew (with `objects`)


# The innermost open scope: an inner one resets the device's peak and must report it to the outer.
_innermost: ContextVar[MemoryScope | None] = ContextVar("innermost memory scope", default=None)


def log_report(report: ScopeReport) -> None:
    """Write one line to the log."""
    log.info(
        "%s: host took %s, kept %s; device took %s, kept %s; %.1f ms",
        report.name,
        *(readable(n) for use in (report.host, report.device) for n in (use.taken, use.kept)),
        report.seconds * 1e3,
    )
    for line in report.grown:
        log.info("%s: %s", report.name, line)


class MemoryScope:
    """Measures a block, as a context manager or a decorator.

    The host's peak is exact if the block set the process's peak RSS; otherwise it is the larger of
    before and after, because the kernel records no other peak. `objects` also counts tensors and
    objects before and after, outside the measurement: about 0.3 s per million.
    """

    def __init__(
        self,
        name: str,
        *,
        device: torch.device | None = None,
        objects: bool = False,
        report: Callable[[ScopeReport], None] = log_report,
    ) -> None:
        self.name, self._give, self._objects = name, report, objects
        self._cuda = device if device is not None and device.type == "cuda" else None
        self.report: ScopeReport | None = None

    def used(self) -> tuple[int, int]:
        """Return the bytes in use now minus those before the block: host, device."""
        return self._resident(self._before) - self._before, self._allocated() - self._device_before

    def __enter__(self) -> MemoryScope:
        self._census = take_census() if self._objects else None
        self._outer = _innermost.get()
        if self._outer is not None:
            self._outer._note_peak()
        _innermost.set(self)
        self._device_peak = 0
        self._device_before = self._allocated()
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        self._record = read_peak()
        self._before = self._resident(0)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        after, record = self._resident(self._before), read_peak()
        peak = max(self._before, after, record if record > self._record else 0)
        self._note_peak()
        device_after = self._allocated()
        device = MemoryUse(
            self._device_before,
            max(self._device_before, self._device_peak, device_after),
            device_after,
        )
        if self._outer is not None:
            self._outer._device_peak = max(self._outer._device_peak, device.peak)
        _innermost.set(self._outer)
        grown = () if self._census is None else tuple(growth_report(self._census))
        host = MemoryUse(self._before, peak, after)
        self.report = ScopeReport(self.name, seconds, host, device, grown)
        self._give(self.report)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: every call is measured separately, recursive ones too."""

        @functools.wraps(function)
        def measured(*args: P.args, **kwargs: P.kwargs) -> R:
            with MemoryScope(
                self.name, device=self._cuda, objects=self._objects, report=self._give
            ):
                return function(*args, **kwargs)

        return measured

    @functools.cached_property
    def _process(self) -> psutil.Process:
        return psutil.Process()

    def _resident(self, otherwise: int) -> int:
        """Return this process's RSS, or `otherwise` if it cannot be read."""
        try:
            return read_rss(self._process)
        except UNREADABLE:
            return otherwise

    def _allocated(self) -> int:
        return 0 if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def _note_peak(self) -> None:
        if self._cuda is not None:
            peak = torch.cuda.max_memory_allocated(self._cuda)
            self._device_peak = max(self._device_peak, peak)


class _Totals:
    """Totals of one scope since the last table."""

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


class ScopeTable:
    """Sums reports by scope name; times are means over the newest passes."""

    def __init__(self, settings: MemorySettings) -> None:
        self._settings = settings
        self._scopes: dict[str, _Totals] = {}

    def add(self, report: ScopeReport) -> None:
        """Add one pass: the `report` callback of scopes."""
        totals = self._scopes.get(report.name)
        if totals is None:
            settings = self._settings
            kept = settings.collect_times if report.name == "collect" else settings.step_times
            totals = self._scopes[report.name] = _Totals(kept)
        totals.add(report)

    def text(self, title: str, **holders: Any) -> str:
        """Return the table since the last call and reset it; list tensors that keep a graph."""
        lines = [f"memory profile, {title}; MB on the host (and the device)"]
        lines.append(f"{'block':<10}{'passes':>9}{'ms/pass':>10}{'most taken':>22}{'kept':>22}")
        for name, scope in self._scopes.items():
            taken = _pair(scope.host_taken, scope.device_taken)
            kept = _pair(scope.host_kept, scope.device_kept)
            lines.append(
                f"{name:<10}{scope.passes:>9,}{scope.milliseconds.mean:>10.3f}{taken:>22}{kept:>22}"
            )
            scope.clear()
        graphs = find_tensors_with_graph(**holders) or ["none"]
        return "\n".join([*lines, "tensors that keep their graph:", *(f"  {g}" for g in graphs)])


def _pair(host: int, device: int) -> str:
    return f"{host / MB:+,.2f} ({device / MB:+,.2f})"
