"""Run presets and append a line for each seed to docs/data/results.jsonl, or check its lines.

A run's directory stays: after SIGTERM or Ctrl-C the same command goes on where the run was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.benchmarks.machinery import ROOT, commit, processor

DATA = ROOT / "docs" / "data" / "results.jsonl"
PACKAGES = ("torch", "gymnasium", "numpy", "numba")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `results` to the benchmark command."""
    parser = subparsers.add_parser("results", help=str(__doc__).splitlines()[0])
    parser.add_argument("experiment", help="preset of configs/experiment")
    parser.add_argument("seeds", nargs="+", type=int, metavar="SEED")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides")
    parser.add_argument("--name", help="experiment of the line (default: preset and overrides)")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "results")
    parser.add_argument("--check", action="store_true", help="rerun lines and compare the scores")
    parser.add_argument("--data", type=Path, default=DATA, help="file that lines are added to")
    parser.set_defaults(run=results)


def results(args: argparse.Namespace) -> None:
    """Run each seed that has no line, or check its line; exit where a run does not finish."""
    for seed in args.seeds:
        typed = [f"experiment={args.experiment}", *args.set, f"seed={seed}"]
        command = shlex.join(["python", "train.py", *typed])
        measured = [each for each in lines(args.data) if each["command"] == command]
        if args.check:
            check(measured, command, typed)
            continue
        if measured:
            print(f"has a line already: {command}")
            continue
        folder = args.runs.resolve() / re.sub(r"[^\w.-]+", "-", " ".join(typed))
        each = {
            "experiment": args.name or named(args.experiment, args.set),
            "command": command,
            **run(folder, typed),
        }
        with args.data.open("a") as file:
            file.write(json.dumps(each) + "\n")
        print(f"{command}: {each['score']:.1f} after {each['seconds']:.0f} s")


def named(preset: str, overrides: Sequence[str]) -> str:
    """Return what lines of one experiment share: an environment has a column of its own."""
    return " ".join([preset, *(each for each in overrides if not each.startswith("env.id="))])


def check(measured: list[dict[str, Any]], command: str, typed: Sequence[str]) -> None:
    """Rerun a line; exit if there is none, or if the score is another one."""
    if not measured:
        sys.exit(f"has no line: {command}")
    with tempfile.TemporaryDirectory() as folder:
        again = run(Path(folder) / "run", typed)
    wrong = disagreement(measured[-1], again)
    if wrong:
        sys.exit(wrong)
    print(f"agrees: {command}")


def run(folder: Path, typed: Sequence[str]) -> dict[str, Any]:
    """Run to the end, from where the run was; return what its line says of it."""
    began = folder.with_name(f"{folder.name}.commit")
    if not began.exists():
        began.parent.mkdir(parents=True, exist_ok=True)
        began.write_text(commit())
    elif began.read_text() != commit():
        sys.exit(f"{folder} began at commit {began.read_text()}, and this is {commit()}")
    code = train([*typed, f"run_dir={folder}", "resume=auto", "checkpoint.seconds=120"])
    if code:
        sys.exit(code)
    return line(folder, began.read_text())


def train(arguments: Sequence[str]) -> int:
    """Train in a process of its own, which gets the signals of this one; return its exit code."""
    child = subprocess.Popen([sys.executable, "train.py", *arguments], cwd=ROOT)
    # Ctrl-C of a terminal reaches the child by itself.
    handlers = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: child.terminate()),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
    }
    try:
        return child.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def line(folder: Path, began: str) -> dict[str, Any]:
    """Return what the line says of a finished run, but for its name and command."""
    summary = json.loads((folder / "summary.json").read_text())
    evaluated = summary.get("eval_return_mean") is not None
    score = summary["eval_return_mean" if evaluated else "return_mean"]
    return {
        "env": summary["env"],
        "seed": summary["seed"],
        "commit": began,
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "versions": {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}},
        "score": score,
        "score_std": summary.get("eval_return_std"),
        # Without evaluations the score is of the last training episodes.
        "episodes": summary["eval_episodes"] if evaluated else min(100, summary["episodes"]),
        "steps": summary["steps"],
        "seconds": round(summary["wall_seconds"], 1),
        "weights_sha256": summary["weights_sha256"],
    }


def lines(data: Path) -> list[dict[str, Any]]:
    """Return all lines of a file of results, none if there is no file."""
    return [json.loads(each) for each in data.read_text().splitlines()] if data.exists() else []


def disagreement(measured: dict[str, Any], again: dict[str, Any]) -> str | None:
    """Return how a rerun of a line disagrees with it; None: it does not.

    With the same processor and versions the score must be the same, else within 5 %.
    """
    same = all(measured.get(key) == again[key] for key in ("processor", "versions"))
    most = 0.0 if same else 0.05 * abs(measured["score"])
    if abs(again["score"] - measured["score"]) <= most:
        return None
    where = "with the same processor and versions" if same else "which is more than 5 %"
    return f"{measured['command']}: {again['score']} instead of {measured['score']}, {where}"
