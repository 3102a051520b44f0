"""Soak test: train for long and check that memory and handles do not grow and speed is constant.

    python scripts/soak.py --steps 1e6 --agents dqn ppo --envs cartpole lunarlander
    python scripts/soak.py --steps 1e5 --agents dqn --envs cartpole --crash-every 1000

writes a report with a plot and exits with 1 if any run exceeds the limits. Every run is evaluated
fifty times. With --crash-every, environments run in subprocesses; each raises after that many
steps and is rebuilt.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.soaking.sampling import ROOT, Soak, soak
from scripts.soaking.verdict import Check, Limits, judge
from steadyrl.agents.registry import ALGORITHMS
from steadyrl.memory.process import MB
from steadyrl.training.checkpoints.run_directory import unused

EVALUATIONS = 50
RESTARTS = 10
Result = tuple[Soak, list[Check]]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=lambda text: int(float(text)), default=1_000_000)
    parser.add_argument("--agents", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--envs", nargs="+", default=["cartpole"])
    parser.add_argument("--set", nargs="*", default=[], help="more overrides for every run")
    parser.add_argument("--runs", type=Path, default=Path("outputs/soak"), help="run directories")
    parser.add_argument("--report", type=Path, default=Path("outputs/soak.md"))
    parser.add_argument("--every-seconds", type=float, default=1.0, help="sampling interval")
    parser.add_argument(
        "--max-slope-mb", type=float, default=1.0, help="limit on memory growth per million steps"
    )
    parser.add_argument("--max-speed-change", type=float, default=0.05)
    parser.add_argument(
        "--max-growth-mb", type=float, default=5.0, help="limit on memory growth after the warm-up"
    )
    parser.add_argument(
        "--warmup", type=float, default=0.2, help="fraction of a run that is not checked"
    )
    parser.add_argument(
        "--crash-every", type=int, default=0, help="steps until an environment raises; 0 = never"
    )
    parser.add_argument(
        "--shared-machine",
        action="store_true",
        help="check speed by CPU seconds; pin the run to one core (taskset)",
    )
    return parser.parse_args(arguments)


def overrides(agent: str, env: str, args: argparse.Namespace) -> list[str]:
    """Return the overrides of a run; those of `--set` come last and win."""
    run_overrides = [f"agent={agent}", f"env={env}", f"total_steps={args.steps}"]
    run_overrides.append(f"eval.every={max(1, args.steps // EVALUATIONS)}")
    return [
        *run_overrides,
        *(crashing(env, args.crash_every) if args.crash_every else ()),
        *args.set,
    ]


def crashing(env: str, every: int) -> list[str]:
    """Return overrides that make an environment raise after `every` steps."""
    base = OmegaConf.select(OmegaConf.load(ROOT / "configs" / "env" / f"{env}.yaml"), "id")
    return [
        "env.id=scripts.soaking.sampling:Crashing-v0",
        f"env.kwargs={{base: {base}, every: {every}}}",
        "env.backend=async",
        "env.max_restarts=1_000_000",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Soak-test every agent on every environment; return the exit code."""
    args = parse(arguments)
    limits = Limits(
        args.max_slope_mb,
        args.max_growth_mb,
        args.max_speed_change,
        args.warmup,
        args.shared_machine,
        restarts=RESTARTS if args.crash_every else 0,
    )
    results: list[Result] = []
    for agent in args.agents:
        for env in args.envs:
            run_dir = unused(args.runs.resolve(), f"{agent}-{env}")
            run_overrides = overrides(agent, env, args)
            found = soak(f"{agent} on {env}", run_overrides, run_dir, args.every_seconds)
            results.append((found, judge(found, limits)))
            for check in results[-1][1]:
                word = "ok  " if check.passed else "FAIL"
                print(f"{word} {found.title}: {check.name} {check.value} (limit {check.limit})")
            write_report(results, args.report)
    return 0 if all(check.passed for _, checks in results for check in checks) else 1


def write_report(results: Sequence[Result], page: Path) -> None:
    """Write the report `page` (Markdown), and its plot beside it."""
    page.parent.mkdir(parents=True, exist_ok=True)
    picture = page.with_suffix(".png")
    draw([soak for soak, _ in results], picture)
    page.write_text(markdown(results, picture.name))


def markdown(results: Sequence[Result], picture: str) -> str:
    """Return the report."""
    lines = [
        "# Soak",
        "",
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}. "
        "Each run is a process of its own, sampled from outside; "
        "Σ PSS counts a page shared by k processes as 1/k in each; checks leave out mapped "
        "files, because pages of shared libraries depend on other programs.",
        "",
        f"![Memory, speed and handles over the runs]({picture})",
    ]
    for found, checks in results:
        seconds = found.samples[-1].seconds if found.samples else 0.0
        shown = [word for word in found.command[1:] if not word.startswith("run_dir=")]
        lines += [
            "",
            f"## {found.title}: {'steady' if all(c.passed for c in checks) else 'NOT steady'}",
            "",
            f"`train.py {' '.join(shown)}` ({seconds:,.0f} s, {len(found.samples)} samples)",
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
    """Plot one row of panels per run."""
    # Not pyplot, which keeps every figure until it is closed.
    figure = Figure(figsize=(14, 3.2 * len(soaks)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(soaks), 4, squeeze=False)
    for row, found in zip(rows, soaks, strict=True):
        _draw_row(row, found)
    figure.savefig(picture, dpi=90)
    figure.clear()


def _draw_row(row: Sequence[Axes], found: Soak) -> None:
    memory, speed, handles, tensors = row
    steps = [sample.step for sample in found.samples]
    memory.plot(steps, [sample.pss / MB for sample in found.samples], label="Σ PSS")
    memory.plot(steps, [sample.own / MB for sample in found.samples], label="without mapped files")
    _lines(memory, found, {"memory/cuda_allocated_mb": "CUDA allocated"})
    memory.set(title=f"{found.title}: MB", ylim=(0, None))
    _lines(speed, found, {"time/steps_per_second": "steps/s"})
    speed.set(title="steps/s", ylim=(0, None))
    for field in ("open_files", "threads", "children"):
        handles.plot(
            steps,
            [getattr(sample, field) for sample in found.samples],
            label=field.replace("_", " "),
        )
    handles.set(title="handles of the process tree")
    _lines(tensors, found, {"memory/live_tensors": "live tensors"})
    tensors.set(title="live tensors")
    for axes in row:
        axes.set_xlabel("steps")
        if axes.lines:
            axes.legend(fontsize="small")


def _lines(axes: Axes, found: Soak, tags: dict[str, str]) -> None:
    for tag, label in tags.items():
        points = [(line["step"], line[tag]) for line in found.logged if tag in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)


if __name__ == "__main__":
    sys.exit(main())
