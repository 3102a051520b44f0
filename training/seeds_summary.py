"""`summary.json` of many seeds: what a run's says, as means over them, and each in short."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from training.files import write_whole
from training.run_directory import SUMMARY, read_summary
from training.sweep_jobs import SweepJob
from training.sweep_run import say

SCORES = ("eval_return", "return")
TOGETHER = ("agent", "env")
EACH = ("seed", "status", "steps", "return_mean", "eval_return_mean", "weights_sha256")


def write_summary(directory: Path, told: Sequence[SweepJob]) -> None:
    """Write how the runs went that have ended; a full disk is a warning."""
    found = [read_summary(Path(account.run_dir)) for account in told if account.begun]
    ended = [summary for summary in found if summary]
    whole: dict[str, Any] = {"status": _status(told), "run_dir": str(directory)}
    for key in TOGETHER:
        whole[key] = next((summary.get(key) for summary in ended), None)
    whole["seeds"] = [int(account.name.removeprefix("seed-")) for account in told]
    for name in SCORES:
        known = [v for s in ended if (v := s.get(f"{name}_mean")) is not None]
        whole[f"{name}_mean"] = fmean(known) if known else None
        whole[f"{name}_std"] = pstdev(known) if known else None  # from seed to seed
    whole["wall_seconds"] = sum(summary.get("wall_seconds", 0.0) for summary in ended)
    whole["runs"] = [{key: summary.get(key) for key in EACH} for summary in ended]
    try:
        write_whole(directory / SUMMARY, json.dumps(whole, indent=2) + "\n")
    except OSError as error:
        say(f"warning: summary.json cannot be written: {error.strerror or error}")


def _status(told: Sequence[SweepJob]) -> str:
    """Return `finished` where all are; else how the first that ended otherwise did."""
    others = [account.status for account in told if account.status != "finished"]
    if set(others) & {"waiting", "running", "killed", "interrupted"}:
        return "interrupted"
    return others[0] if others else "finished"
