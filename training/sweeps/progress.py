"""The jobs of a sweep as text: its progress in one line, and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from steadyrl.training.logging.terminal import score as shown
from steadyrl.training.sweeps.jobs import SweepJob

FAILED = ("diverged", "failed", "killed")


def progress_line(jobs: Sequence[SweepJob], at_once: int = 1) -> str:
    """Return the progress of a sweep as one line; `at_once` jobs run in parallel.

    It shows done, running and failed jobs, the best score and the time left.
    """
    count = Counter(job.status for job in jobs)
    failed = sum(count[status] for status in FAILED)
    parts = [f"{count['finished']}/{len(jobs)} done", f"{count['running']} running"]
    parts += [f"{failed} failed"]
    parts += [f"{count['interrupted']} interrupted"] if count["interrupted"] else []
    scored = [
        (job.score, job.label) for job in jobs if job.status == "finished" and job.score is not None
    ]
    if scored:
        score, label = max(scored, key=lambda each: each[0])
        parts.append(f"best {shown(score)} ({label})")
    took = [job.seconds for job in jobs if job.status == "finished" and job.seconds]
    left = sum(job.status in ("waiting", "running") for job in jobs)
    return "sweep: " + ", ".join([*parts, *time_left(took, left, at_once)])


def time_left(took: Sequence[float], left: int, at_once: int) -> list[str]:
    """Return the time that `left` jobs still take, as text; empty if that is none or unknown."""
    if not took or left <= 0:
        return []
    seconds = round(sum(took) / len(took) * max(left / max(at_once, 1), 1.0))
    return [f"about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"]


def _short(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def table(jobs: Sequence[SweepJob]) -> str:
    """Return the jobs as an aligned table: label, status, score, seconds, error."""
    rows = [("job", "status", "score", "seconds", "")]
    for job in jobs:
        score = "–" if job.score is None else shown(job.score)
        seconds = "–" if job.seconds is None else f"{job.seconds:.1f}"
        rows.append((job.label, job.status, score, seconds, _short(job.error or "")))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    )
