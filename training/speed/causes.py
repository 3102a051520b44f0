"""Why training became slower, in sentences: two samples compared."""

from __future__ import annotations

from collections.abc import Iterator

from steadyrl.training.speed.sample import PARTS, Sample

# Parts of the time that a step takes longer, from which something is named, or called the cause.
PART, CULPRIT = 0.15, 0.5
# Least relative changes that are named.
CLOCK_CHANGE = 0.1
MEMORY_CHANGE, MEMORY_MB = 0.1, 64
LENGTH_CHANGE = 0.2
UPDATES_CHANGE = 0.1
OWN_CORES = 0.9  # CPU time over all usable cores, from which a run waits for its own processes


def causes(before: Sample, now: Sample, cores: int) -> Iterator[str]:
    """Yield sentences: which parts take longer, the processor, and what else changed."""
    longer = now.total - before.total
    changes = {name: getattr(now, name) - getattr(before, name) for name in PARTS}
    named = [name for name in sorted(changes, key=changes.__getitem__, reverse=True)
             if changes[name] >= PART * longer]  # fmt: skip
    parts = (
        f"{name} {readable(getattr(before, name))} to {readable(getattr(now, name))} ms"
        for name in named
    )
    yield f"A step takes {readable(longer)} ms longer: {', '.join(parts) or 'every part a little'}"
    yield _processor(before, now, cores)
    if before.mhz and now.mhz and now.mhz < (1 - CLOCK_CHANGE) * before.mhz:
        yield f"The processor's clock fell from {before.mhz:,.0f} to {now.mhz:,.0f} MHz"
    if _changed(before.updates, now.updates, UPDATES_CHANGE):
        yield f"Updates per step went from {before.updates:.3g} to {now.updates:.3g}"
    if _changed(before.length, now.length, LENGTH_CHANGE):
        yield f"Episodes went from {before.length:,.0f} to {now.length:,.0f} steps"
    if before.rss_mb and now.rss_mb:
        grown = now.rss_mb - before.rss_mb
        if grown > max(MEMORY_MB, MEMORY_CHANGE * before.rss_mb):
            yield f"Memory grew by {grown:,.0f} MB meanwhile"


def _processor(before: Sample, now: Sample, cores: int) -> str:
    """Return whether others took the processor, if the system reports it."""
    longer = now.total - before.total
    use = f"CPU {_percent(now.cpu, now)} of the time, {_percent(before.cpu, before)} before"
    throttled = (now.throttled or 0.0) - (before.throttled or 0.0)
    if throttled >= CULPRIT * longer:
        return f"The control group's CPU limit stopped the run for {_percent(throttled, now)} more"
    if before.waited is None or now.waited is None:
        return f"Whether others take the processor is unknown ({use})"
    waits = f"{_percent(now.waited, now)} of the time, {_percent(before.waited, before)} before"
    rises = now.waited / now.total > before.waited / before.total
    if not rises or now.waited - before.waited < CULPRIT * longer:
        return f"The processor is not the cause (waited for it {waits}; {use})"
    if now.cpu >= OWN_CORES * cores * now.total:
        return f"The run's own processes fill its {cores} cores (waited for one {waits}; {use})"
    return f"Other processes take the processor: the run waits for it {waits} ({use})"


def _changed(before: float | None, now: float | None, least: float) -> bool:
    return before is not None and now is not None and abs(now - before) > least * before


def _percent(part: float, sample: Sample) -> str:
    return f"{100 * part / sample.total:.0f}%"


def readable(value: float) -> str:
    """Return a number with three digits, or as a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
