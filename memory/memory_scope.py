"""Measure a block of code: memory on host and device, and time."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, ParamSpec, TypeVar

import psutil
import torch

from steadyrl.memory.process import UNREADABLE, read_peak, read_rss, readable

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


class MemoryScope:
    """Measures a block, as a context manager or a decorator.

    The host's peak is exact if the block set the process's peak RSS; otherwise it is the larger of
    before and after, because the kernel records no other peak.
    """

    def __init__(
        self,
        name: str,
        *,
        device: torch.device | None = None,
        report: Callable[[ScopeReport], None] = log_report,
    ) -> None:
        self.name, self._give = name, report
        self._cuda = device if device is not None and device.type == "cuda" else None
        self.report: ScopeReport | None = None

    def __enter__(self) -> MemoryScope:
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
        self.report = ScopeReport(self.name, seconds, MemoryUse(self._before, peak, after), device)
        self._give(self.report)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: every call is measured separately, recursive ones too."""

        @functools.wraps(function)
        def measured(*args: P.args, **kwargs: P.kwargs) -> R:
            with MemoryScope(self.name, device=self._cuda, report=self._give):
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
