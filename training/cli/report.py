"""Write a report of runs: one HTML file with curves, evaluations, losses, memory and speed.

python scripts/report.py outputs/CartPole-v1/dqn/2026-…
python scripts/report.py outputs --by agent --out report.html
python scripts/report.py uniform='runs/uniform-*' prioritised='runs/per-*'

The file needs no network and no other file. Of one run it is RUN/report.html, else report.html in
this directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from steadyrl.core.errors import SettingError, exit_on_error, one_line
from steadyrl.core.files import write_atomic
from steadyrl.training.analysis.groups import Group, groups
from steadyrl.training.checkpoints.run_directory import REPORT
from steadyrl.training.cli.programs import runs_parser, validate_out
from steadyrl.training.logging.terminal import safe_stdout
from steadyrl.training.report.page import LINES, page


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = runs_parser(__doc__)
    parser.add_argument("--out", type=Path, help="the file to write; - prints it")
    return parser.parse_args(arguments)


def report(args: argparse.Namespace) -> None:
    """Read the groups and write their report."""
    found, left_out = groups(args.runs, None, args.by, LINES)
    out = args.out or default_out(found)
    validate_out(out)
    if out.suffix not in ("", ".html", ".htm"):
        raise SettingError("--out", out, "must end in .html: the report is a page")
    if str(out) == "-":
        print(page(found, left_out, Path()), end="")
        return
    try:
        write_atomic(out, page(found, left_out, out.parent))
    except OSError as error:
        raise SettingError("--out", out, f"cannot be written: {error.strerror}") from None
    for line in left_out:
        print(one_line(line), file=sys.stderr)
    print(f"report: {out}")


def default_out(found: Sequence[Group]) -> Path:
    """Return the file in a single run's directory, or in the working directory."""
    runs = [run.path for group in found for run in group.runs]
    return runs[0] / REPORT if len(runs) == 1 else Path(REPORT)


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Write the report; errors are printed as one line."""
    with safe_stdout():
        report(parse(arguments))
