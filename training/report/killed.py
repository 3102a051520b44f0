"""What the last readings of a killed run say about memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from steadyrl.core.files import read_tail
from steadyrl.core.safe_parsing import from_json
from steadyrl.memory.process import MB, readable
from steadyrl.training.checkpoints.run_directory import SUMMARY
from steadyrl.training.logging.sinks import METRICS

TAIL_BYTES = 256_000  # of the metrics: hundreds of lines, of which one in a second has readings
NEAR = 0.15  # of what the run had: it used the rest
USED = ("memory/tree_pss_mb", "memory/swap_mb")
LEFT = "memory/available_mb"


def memory_near_limit(run: Path) -> str | None:
    """Return the last reading of memory of a run that was killed, if little was left then.

    None: the run ended by itself, which its summary says, or memory was not near a limit.
    """
    if (run / SUMMARY).exists():
        return None
    reading = _last_reading(run / METRICS)
    if reading is None:
        return None
    used, left = sum(reading[tag] for tag in USED), reading[LEFT]
    if left >= NEAR * (used + left):
        return None
    return (
        f"at step {reading['step']:,.0f}, its last reading, it used {readable(used * MB)} of "
        f"memory and {readable(left * MB)} were left below the limit"
    )


def _last_reading(path: Path) -> Mapping[str, float] | None:
    """Return the newest line of metrics that has a full reading of memory."""
    try:
        lines = read_tail(path, TAIL_BYTES).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            found = from_json(line.encode())
            reading = {tag: float(found[tag]) for tag in ("step", *USED, LEFT)}
        except (ValueError, KeyError, TypeError, OverflowError):
            continue  # cut, damaged, or without a reading
        if all(map(math.isfinite, reading.values())):
            return reading
    return None
