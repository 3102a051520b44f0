"""Write what a soak found: a picture and a page."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from memory.process import MB
from scripts.soaking.sampling import Soak
from scripts.soaking.verdict import Check

Result = tuple[Soak, list[Check]]


def write_report(results: Sequence[Result], page: Path) -> None:
    """Write `page` (Markdown) and, beside it, the picture it shows."""
    page.parent.mkdir(parents=True, exist_ok=True)
    picture = page.with_suffix(".png")
    draw([soak for soak, _ in results], picture)
    page.write_text(markdown(results, picture.name))


def markdown(results: Sequence[Result], picture: str) -> str:
    """Return the page."""
    lines = [
        "# Soak",
        "",
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}. "
        "Each run is a process of its own, looked at from outside; "
        "Σ PSS counts a page shared by k processes as 1/k in each; what is judged is its part "
        "without mapped files, because that of libraries moves with what else runs here.",
        "",
        f"![Memory, speed and handles over the runs]({picture})",
    ]
    for soak, checks in results:
        seconds = soak.samples[-1].seconds if soak.samples else 0.0
        told = [word for word in soak.command[1:] if not word.startswith("run_dir=")]
        lines += [
            "",
            f"## {soak.title}: {'steady' if all(c.passed for c in checks) else 'NOT steady'}",
            "",
            f"`train.py {' '.join(told)}` ({seconds:,.0f} s, {len(soak.samples)} samples)",
            "",
            "| check | found | limit | |",
            "|---|---:|---:|---|",
        ]
        lines += [
            f"| {check.name} | {check.value} | {check.limit} | {'✓' if check.passed else '✗'} |"
            for check in checks
        ]
    return "\n".join(lines) + "\n"


def draw(soaks: Sequence[Soak], picture: Path) -> None:
    """Draw one row of panels per run."""
    # Not through pyplot, which keeps every figure until it is told to close it.
    figure = Figure(figsize=(14, 3.2 * len(soaks)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(soaks), 4, squeeze=False)
    for row, soak in zip(rows, soaks, strict=True):
        _draw_row(row, soak)
    figure.savefig(picture, dpi=90)
    figure.clear()


def _draw_row(row: Sequence[Axes], soak: Soak) -> None:
    memory, speed, handles, tensors = row
    steps = [sample.step for sample in soak.samples]
    memory.plot(steps, [sample.pss / MB for sample in soak.samples], label="Σ PSS")
    memory.plot(steps, [sample.own / MB for sample in soak.samples], label="without files")
    _lines(memory, soak, {"memory/cuda_allocated_mb": "CUDA allocated"})
    memory.set(title=f"{soak.title}: MB", ylim=(0, None))
    _lines(speed, soak, {"time/steps_per_second": "steps/s"})
    speed.set(title="steps/s", ylim=(0, None))
    for field in ("open_files", "threads", "children"):
        handles.plot(
            steps,
            [getattr(sample, field) for sample in soak.samples],
            label=field.replace("_", " "),
        )
    handles.set(title="handles of the tree")
    _lines(tensors, soak, {"memory/live_tensors": "live tensors"})
    tensors.set(title="live tensors")
    for axes in row:
        axes.set_xlabel("steps")
        if axes.lines:
            axes.legend(fontsize="small")


def _lines(axes: Axes, soak: Soak, tags: dict[str, str]) -> None:
    for tag, label in tags.items():
        points = [(line["step"], line[tag]) for line in soak.logged if tag in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
