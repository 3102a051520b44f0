"""The programs of the command `steadyrl`, and parts of the parsers that several have."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from steadyrl.core.command.typed import as_typed, command_of
from steadyrl.core.errors import CommandError, SettingError, did_you_mean, nearest

COLUMNS = 80  # of a report on a terminal


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
    "completion": Program("shell.completion", "complete programs, keys and presets in a shell"),
    "doctor": Program("checks.doctor", "describe this machine for a bug report; what is wrong"),
}


SHORT_HELP = """Train reinforcement learning agents on Gymnasium environments.

  python train.py experiment=cartpole_ppo    a tuned preset, some seconds
  python train.py env.id=Blackjack-v1        any Gymnasium id
  python train.py --help                     more, and every preset

Programs; each has --help:
"""


def short_help() -> str:
    """Return what the command without arguments prints: first commands, and all programs."""
    return as_typed(SHORT_HELP) + list_of_programs({"train": "train an agent"})


def list_of_programs(more: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a line for each program: its command, and what it does; those of `more` first."""
    summaries = {**more, **{name: program.summary for name, program in PROGRAMS.items()}}
    commands = {command_of(name): summary for name, summary in summaries.items()}
    width = max(map(len, commands))
    return "\n".join(f"  {command:{width}}  {what}" for command, what in commands.items())


class ProgramParser(argparse.ArgumentParser):
    """A parser that refuses a wrong argument in one line with the nearest valid one.

    `habits`: options of other trainers' programs, and what is written here.
    """

    def __init__(self, *, habits: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._habits = habits or {}

    def parse_known_args(  # type: ignore[override]  # overloaded in the base class
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; refuse unknown arguments here, where the options of a subcommand are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._refusal(unknown[0]))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Raise CommandError instead of printing the usage."""
        raise CommandError(refusal(message))

    def _refusal(self, unknown: str) -> str:
        """Return what is wrong with an argument that no option or positional takes."""
        option, _, value = unknown.partition("=")
        known = re.findall(r"--[a-z-]+", self.format_usage())
        if option.startswith("env.") and "--env" in known:
            return f"{unknown}: write --env {unknown.removeprefix('env.')}; see --help"
        named = f"--{option.rpartition('.')[2].replace('_', '-')}"  # eval.episodes=100: --episodes
        if value and named in known:
            return f"{unknown}: write {named} {value}; see --help"
        if not option.startswith("-"):
            return f"{unknown}: unexpected"
        habit = self._habits.get(option.replace("_", "-"))
        there = f"there are: {', '.join(known)}" if known else "see --help"
        return f"{option}: no such option; {habit or did_you_mean(option, known) or there}"


def refusal(message: str) -> str:
    """Return an error message of argparse in one line of ours."""
    choice = re.fullmatch(r"argument (\S+): invalid choice: '?(.*?)'? \(.*from (.*)\)", message)
    if choice:
        name, value, there = choice.groups()
        hint = nearest(value, re.findall(r"[\w-]+", there))
        option = name.rpartition("/")[2] if name.startswith("-") else ""
        return f"{option}={value}: {hint}" if option else f"{value}: no such command; {hint}"
    message = re.sub(r"^the following arguments are required: (.*)", r"\1 is missing", message)
    message = re.sub(r"expected one argument$", "needs a value", message)
    message = re.sub(r": invalid (\w+) value: '(.*)'$", r"=\2: is no \1", message)
    return message.removeprefix("argument ") + ("" if ";" in message else "; see --help")


def paragraph(label: str, text: str, indent: int) -> str:
    """Return a text in lines of COLUMNS, beside its label."""
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=f"{label:{indent}}",
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def documented_parser(
    doc: str | None, *notes: str, habits: Mapping[str, str] | None = None
) -> ProgramParser:
    """Return a parser whose help has a module's docstring around the arguments.

    The first line is the description; `notes` and the rest follow the arguments.
    """
    first, _, *rest = as_typed(doc or "\n").splitlines()
    return ProgramParser(
        habits=habits,
        description=first,
        epilog="\n".join([*notes, *rest]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def folder_of_presets(text: str) -> Path:
    """Return the folder that `--config-dir` names; CommandError if it names none."""
    if not text.strip():
        raise CommandError("--config-dir: is empty: name a folder of presets")
    if not Path(text).is_dir():
        raise CommandError(f"--config-dir {text}: no such directory")
    return Path(text)


def validate_out(out: Path, option: str = "--out") -> None:
    """Raise SettingError if an option names no file, such as an empty variable of the shell.

    A device or pipe is refused, too: files are written beside and renamed, which would replace it.
    """
    if not out.name:
        raise SettingError(option, out, "names no file")
    if out.exists() and not (out.is_file() or out.is_dir()):
        raise SettingError(option, out, "is not a plain file")


def runs_parser(doc: str | None, *notes: str) -> ProgramParser:
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
        action="extend",
        type=lambda text: [key for key in text.split(",") if key],
        default=[],
        help="group by these keys: agent,env,agent.n_step",
    )
    return parser
