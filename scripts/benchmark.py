"""Measure this program on the machine at hand, beside others where they are installed.

    taskset -c 0 python scripts/benchmark.py replay

Peers come with `pip install -e ".[peers]"`. All contestants run in one process, in turns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.benchmarks import agents, growth, race, replay, rollout, watch

# One module an idea; each brings add_parser(subparsers), which says what to run.
MODULES = (agents, race, replay, rollout, growth, watch)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and run one benchmark."""
    description = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=description)
    subparsers = parser.add_subparsers(required=True, metavar="benchmark")
    for module in MODULES:
        module.add_parser(subparsers)
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
