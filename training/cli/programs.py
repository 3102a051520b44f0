"""The programs of the command `steadyrl`, and parts of the parsers that several have."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from steadyrl.core.command.typed import as_typed, command_of


class Program(NamedTuple):
    """A program: the module below training/cli whose `main` runs it, and a line for the help."""

    module: str
    summary: str


# scripts/<name>.py starts each in a clone. Whatever names none of them trains.
PROGRAMS = {
    "evaluate": Program("evaluate", "score a policy, film it, or watch it"),
    "plot": Program("plot", "draw learning curves of many runs, with bands"),
    "compare": Program("compare", "tabulate scores, speed and memory of many runs"),
    "report": Program("report", "write one page on runs: how they ended, curves, films"),
    "checkpoint": Program("checkpoint", "list and verify the checkpoints of a run"),
    "export": Program("policy_files.export", "export a policy to safetensors or ONNX"),
    "record": Program("policy_files.record", "write episodes of a policy to a file"),
    "tune": Program("tune", "tune hyperparameters with Optuna"),
    "population": Program("population", "train a population on Ray Tune"),
    "envs": Program("checks.envs", "list presets of environments; check an environment"),
    "completion": Program("shell.completion", "complete programs, keys and presets in bash"),
    "doctor": Program("checks.doctor", "describe this machine for a bug report; what is wrong"),
}


def list_of_programs() -> str:
    """Return a line for each program: its command, and what it does."""
    commands = {command_of(name): program.summary for name, program in PROGRAMS.items()}
    width = max(map(len, commands))
    return "\n".join(f"  {command:{width}}  {what}" for command, what in commands.items())


def documented_parser(doc: str | None, *notes: str) -> argparse.ArgumentParser:
    """Return a parser whose help has a module's docstring around the arguments.

    The first line is the description; `notes` and the rest follow the arguments.
    """
    first, _, *rest = as_typed(doc or "\n").splitlines()
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
