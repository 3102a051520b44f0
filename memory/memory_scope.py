"""Measure a block of code: memory on host and device, objects that grew, and time."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import psutil
import torch

from steadyrl.core.history import History
from steadyrl.memory.gpu.peak import open_peak
from steadyrl.memory.gpu.timer import DeviceTimer
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
    growth: tuple[str, ...] = ()  # lines about tensors and objects that grew (with `objects`)
    timer: DeviceTimer | None = None  # of the block on a card, whose work may not be done yet


def log_report(report: ScopeReport) -> None:
    """Write one line to the log; on a card this waits until the block's work is done."""
    log.info(
        "%s: host took %s, kept %s; device took %s, kept %s; %.1f ms%s",
        report.name,
        *(readable(n) for use in (report.host, report.device) for n in (use.taken, use.kept)),
        report.seconds * 1e3,
        "" if report.timer is None else f", {report.timer.seconds() * 1e3:.1f} ms on the device",
    )
    for line in report.growth:
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
        self._device_before = self._allocated()
        self._device_peak = None if self._cuda is None else open_peak(self._cuda)
        self._timer = None if self._cuda is None else DeviceTimer(self._cuda)
        self._record = read_peak()
        self._before = self._resident(0)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        if self._timer is not None:
            self._timer.stop()
        after, record = self._resident(self._before), read_peak()
        peak = max(self._before, after, record if record > self._record else 0)
        device_peak = 0 if self._device_peak is None else self._device_peak.read()
        device = MemoryUse(self._device_before, device_peak, self._allocated())
        growth = () if self._census is None else tuple(growth_report(self._census))
        host = MemoryUse(self._before, peak, after)
        self.report = ScopeReport(self.name, seconds, host, device, growth, self._timer)
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


class _Totals:
    """Totals of one scope since the run's start."""

    def __init__(self, passes_kept: int) -> None:
        self.milliseconds, self.device_milliseconds = History(passes_kept), History(passes_kept)
        self.passes = self.host_taken = self.host_kept = self.device_taken = self.device_kept = 0
        self.seconds = 0.0
        self._timers: deque[DeviceTimer] = deque()  # of work that a card has not done yet

    def add(self, report: ScopeReport) -> None:
        self.passes += 1
        self.seconds += report.seconds
        self.milliseconds.append(report.seconds * 1e3)
        self.host_taken = max(self.host_taken, report.host.taken)
        self.host_kept += report.host.kept
        self.device_taken = max(self.device_taken, report.device.taken)
        self.device_kept += report.device.kept
        if report.timer is not None:
            self._timers.append(report.timer)
        while self._timers and self._timers[0].is_over():
            self._read_timer()

    def wait(self) -> None:
        """Wait until a card has done all work of this scope."""
        while self._timers:
            self._read_timer()

    def _read_timer(self) -> None:
        self.device_milliseconds.append(self._timers.popleft().seconds() * 1e3)


class ScopeTable:
    """Sums reports by scope name since the start; times are means over the newest passes."""

    def __init__(
        self,
        settings: MemorySettings,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._on_card = device is not None and device.type == "cuda"
        self._start = clock()
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
        """Return the table of all passes so far; list tensors that keep a graph.

        On a card, this waits for the blocks' work: the only wait of the profile.
        """
        seconds = max(self._clock() - self._start, 1e-9)
        where = "host (card)" if self._on_card else "host"
        lines = [f"memory profile, {title}, on the {where}"]
        lines.append(
            f"{'block':<10}{'passes':>9}{'time':>8}{'ms/pass':>20}{'most taken MB':>22}"
            f"{'kept MB':>22}"
        )
        for name, scope in self._scopes.items():
            scope.wait()
            times = self._pair(scope.milliseconds.mean, scope.device_milliseconds.mean, "{:,.3f}")
            taken = self._pair(scope.host_taken / MB, scope.device_taken / MB, "{:+,.2f}")
            kept = self._pair(scope.host_kept / MB, scope.device_kept / MB, "{:+,.2f}")
            lines.append(
                f"{name:<10}{scope.passes:>9,}{scope.seconds / seconds:>8.1%}{times:>20}"
                f"{taken:>22}{kept:>22}"
            )
        graphs = find_tensors_with_graph(**holders) or ["none"]
        return "\n".join([*lines, "tensors that keep their graph:", *(f"  {g}" for g in graphs)])

    def _pair(self, host: float, card: float, how: str) -> str:
        return how.format(host) + (f" ({how.format(card)})" if self._on_card else "")
