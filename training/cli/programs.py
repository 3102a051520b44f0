"""Parts of the parsers that several programs have."""

from __future__ import annotations

import argparse


def documented_parser(doc: str | None, *notes: str) -> argparse.ArgumentParser:
    """Return a parser whose help has a module's docstring around the arguments.

    The first line is the description; `notes` and the rest follow the arguments.
    """
    first, _, *rest = (doc or "\n").splitlines()
    return argparse.ArgumentParser(
        description=first,
        epilog="\n".join([*notes, *rest]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def runs_parser(doc: str | None, *notes: str) -> argparse.ArgumentParser:
    """Return a `documented_parser` for programs that read groups of runs: RUN… and --by."""
    parser = documented_parser(doc, *notes)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run directory, folder of runs, glob pattern, or NAME=RUN",
    )
    parser.add_argument(
        "--by",
        type=lambda text: [key for key in text.split(",") if key],
        default=[],
        help="group by these keys: agent,env,agent.n_step",
    )
    return parser
