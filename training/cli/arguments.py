"""Parse the command line before Hydra does, and build the help text."""

from __future__ import annotations

import argparse
import re
import textwrap
import unicodedata
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

from steadyrl.agents.registry import ALGORITHMS, GROUP
from steadyrl.core.command.typed import as_typed, command_of, install_command, installed_version
from steadyrl.core.errors import CommandError
from steadyrl.training.checkpoints.run_directory import RUNS
from steadyrl.training.cli.programs import folder_of_presets, list_of_programs, refusal
from steadyrl.training.config.hints.chosen_agent import agent_of
from steadyrl.training.config.hints.keys import (
    first_lines,
    is_switch,
    key_for,
    keys_of,
    unknown_key,
    write_hint,
)
from steadyrl.training.config.hints.other_trainers import (
    other_agents_hint,
    switch_override,
    unit_hint,
    why_absent,
)
from steadyrl.training.config.outside_agents import offer_agents
from steadyrl.training.config.overrides import for_hydra, without_hydra
from steadyrl.training.config.settings import CONFIGS

HELP = """Train {algorithms} on a Gymnasium environment.

  python train.py                            DQN on CartPole, about a minute
  python train.py agent=ppo env=acrobot      another algorithm, another environment
  python train.py experiment=cartpole_ppo    a tuned preset
  python train.py env.id=Blackjack-v1        any Gymnasium id
  python train.py agent.learning_rate=1e-3   any key of the configuration
  python train.py -m seed=0,1,2              one run for each value (docs/many-runs.md)
  python train.py 'seeds=[0,1,2]'            the same, in one process
  python train.py --cfg job                  print every key and its value
  python train.py --config-dir DIR env=mine  a preset of your own: DIR/env/mine.yaml

{groups}
Exit code 0: finished; 9: finished, but results could not be written (all codes: docs/commands.md).
Runs are written to outputs/; watch them with: tensorboard --logdir outputs

More programs; each has --help:
{programs}
"""

# Extra and default overrides of each launcher: submitit ends jobs after an hour, and does not
# requeue preempted Slurm jobs, unless configured.
LAUNCHERS = {
    "joblib": ("sweep", ()),
    "submitit_local": ("slurm", ("hydra.launcher.timeout_min=100000",)),
    "submitit_slurm": ("slurm", ("hydra.launcher.max_num_timeout=1000",)),
}

# Values of keys that are typed as options without one.
EXAMPLES = {"resume": "last", "init_from": "RUN"}

DIRECTORIES = ("run_dir", "hydra.run.dir", "hydra.sweep.dir")

# Options that are not passed to Hydra.
OURS = ("help", "version", "overrides")

# Options that exclude each other: each replaces a single training run.
INSTEAD = ("multirun", "cfg", "info", "hydra_help", "shell_completion")

PARTS_OF_CONFIG = ("job", "hydra", "all")

PARTS_OF_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


class Arguments(NamedTuple):
    """A parsed command line; Hydra takes options before overrides."""

    options: list[str]
    overrides: list[str]
    wants_help: bool
    wants_version: bool
    multirun: bool
    presets: Path | None  # the folder of --config-dir
    prints: bool  # Hydra prints something and nothing is trained

    @property
    def plain(self) -> bool:
        """Whether this is a single run without Hydra options or hydra.* overrides."""
        return not self.options and without_hydra(self.overrides) == self.overrides


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(refusal(message))


def read(given: list[str]) -> Arguments:
    """Parse the command line, options in any position; raise CommandError if it is invalid."""
    for argument in given:
        _validate_printable(argument)
    # `steadyrl train …` equals `steadyrl …`.
    typed, unknown = _parser().parse_known_intermixed_args(given[given[:1] == ["train"] :])
    if unknown:
        # Overrides and values after the first are in there too.
        options = [text for text in dict.fromkeys(unknown) if re.match(r"-[^\d.]", text)] or unknown
        first, *others = [_no_such_option(option, given, typed.config_dir) for option in options]
        raise CommandError(first).with_details(*first_lines(others))
    instead = [name for name in INSTEAD if getattr(typed, name)]
    if len(instead) > 1:
        names = " and ".join(_spelled(name) for name in instead)
        raise CommandError(f"{names} cannot be combined")
    if typed.resolve and not typed.cfg:
        raise CommandError("--resolve belongs to --cfg: --cfg job --resolve")
    overrides = [
        _rewritten(offer_agents(for_hydra(text)), multirun=typed.multirun)
        for text in typed.overrides
        if text != "experiment=null"  # the printed default, which Hydra cannot read
    ]
    keys = {text.partition("=")[0] for text in overrides}
    for name, (_, defaults) in LAUNCHERS.items():
        if f"hydra/launcher={name}" in overrides:
            overrides += [text for text in defaults if text.partition("=")[0] not in keys]
    prints = bool(instead) and not typed.multirun
    return Arguments(
        _options(typed),
        overrides,
        typed.help,
        typed.version,
        typed.multirun,
        typed.config_dir,
        prints,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for names in (
        ("-h", "--help"),
        ("-m", "--multirun"),
        ("-r", "--run"),
        ("-sc", "--shell-completion"),
        ("--hydra-help",),
        ("--resolve",),
        ("--version",),
    ):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("-c", "--cfg", choices=PARTS_OF_CONFIG)
    parser.add_argument("-i", "--info", choices=PARTS_OF_INFO, nargs="?", const="all")
    parser.add_argument("-p", "--package")
    parser.add_argument("-cd", "--config-dir", type=folder_of_presets)
    parser.add_argument("-cn", "--config-name")
    parser.add_argument("overrides", nargs="*")
    return parser


def _options(typed: argparse.Namespace) -> list[str]:
    """Return the options in Hydra's syntax."""
    hydras = {_spelled(n): value for n, value in vars(typed).items() if n not in OURS}
    given = {name: value for name, value in hydras.items() if value not in (None, False)}
    return [name if value is True else f"{name}={value}" for name, value in given.items()]


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _rewritten(override: str, *, multirun: bool) -> str:
    key, _, value = override.partition("=")
    key = key.lstrip("+")
    if key in DIRECTORIES and not value.strip("'\" "):  # such as an empty variable of the shell
        raise CommandError(f"{override}: is empty: name a directory, or leave it out")
    if key == "hydra/launcher" and value in LAUNCHERS:
        package = f"hydra_plugins.hydra_{value.partition('_')[0]}_launcher"
        if not _is_installed(package):
            extra = LAUNCHERS[value][0]
            raise CommandError(f"{override}: needs the extra {extra}: {install_command(extra)}")
    if key == "hydra.run.dir" and not multirun:
        return f"run_dir={value}"
    if key.startswith("hydra.output_subdir"):
        raise CommandError(f"{override}: .hydra/ is always in the run directory")
    return override


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _validate_printable(argument: str) -> None:
    for position, character in enumerate(argument):
        if unicodedata.category(character) in ("Cc", "Cs"):
            raise CommandError(
                f"{argument!r}: character {position + 1} is not printable; control characters and "
                "non-UTF-8 bytes are not accepted"
            )


def _no_such_option(option: str, given: list[str], presets: Path | None) -> str:
    name, equals, value = option.lstrip("-").partition("=")
    if not equals:
        following = given[given.index(option) + 1 :] if option in given else []
        is_value = following and following[0][:1] not in ("-", "") and "=" not in following[0]
        value = following[0] if is_value else ""
    agent = agent_of(given, presets)
    name = name.replace("-", "_")
    instead, why = switch_override(name, value), why_absent(name, value)
    if instead is None and why is None:
        instead = _as_override(name, value, agent)
    if instead is None:
        reason = why or unknown_key(name, agent).removeprefix("no such key; ")
    elif instead.startswith(command_of("evaluate")):
        reason = write_hint(instead)
    else:
        counted = "" if switch_override(name, value) else unit_hint(name, instead.partition("=")[0])
        others = counted + other_agents_hint(name, keys_of(agent))
        newest = f" (the newest unfinished run in {RUNS}/)" if instead == "resume=last" else ""
        reason = f"keys are written without dashes: {instead}{newest}{others}"
    return f"{option}: no such option; {reason}"


def _as_override(name: str, value: str, agent: str) -> str | None:
    """Return the override for an option with this name and value; None: no key has the name."""
    if name == "env" and (CONFIGS / "env" / f"{value}.yaml").exists():
        return f"env={value}"
    negated = key_for(name.removeprefix("no_"), agent)
    if not value and name.startswith("no_") and negated and is_switch(negated, agent):
        return f"{negated}=false"
    key = key_for(name, agent)
    if key is None:
        return None
    if not value:
        value = "true" if is_switch(key, agent) else EXAMPLES.get(key, "…")
    return f"{key}={value}"


def help_text() -> str:
    """Return the help text, with the config groups and installed agents."""
    groups = []
    for folder in sorted(path for path in CONFIGS.rglob("*") if path.is_dir()):
        group = ".".join(folder.relative_to(CONFIGS).parts)
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        if len(names) < 2:  # no choice
            continue
        if group == "agent":
            names += sorted(entry_points(group=GROUP).names)
        text = f"{group}={', '.join(names)}"
        groups.append(textwrap.fill(text, 100, subsequent_indent="  "))
    *others, last = (entry.cls for entry in ALGORITHMS.values())
    algorithms = f"{', '.join(others)} or {last}"
    parts = {"algorithms": algorithms, "groups": "\n".join(groups)}
    return as_typed(HELP).format(**parts, programs=list_of_programs())


def version() -> str:
    """Return the package's name and version."""
    found = installed_version("steadyrl")
    return f"steadyrl {found}" if found else "steadyrl, from a checkout that is not installed"
