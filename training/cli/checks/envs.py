"""List the presets of environments, or check an environment.

python scripts/envs.py                                  presets, and the extras they need
python scripts/envs.py check CartPole-v1                an id of Gymnasium's registry
python scripts/envs.py check my_module:MyEnv-v0         an environment of your own
python scripts/envs.py check frozenlake env.kwargs.map_name=8x8

`check` runs Gymnasium's checker and what training needs beyond it: spaces, rewards, episodes
that end, determinism, replay. It shows how observations are encoded, and how fast each backend
steps. Exit code 4: a fault was found; 2: there is no such environment.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec as find_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from steadyrl.core.command.typed import install_command
from steadyrl.core.errors import (
    CommandError,
    SettingError,
    exit_on_error,
    one_line,
    printable,
)
from steadyrl.training.cli.programs import (
    COLUMNS,
    ProgramParser,
    documented_parser,
    folder_of_presets,
    paragraph,
)
from steadyrl.training.config.hints.explain import explain
from steadyrl.training.config.overrides import as_override
from steadyrl.training.config.settings import CONFIGS, load_settings
from steadyrl.training.logging.terminal import safe_stdout, stdout_to_stderr

if TYPE_CHECKING:
    from steadyrl.envs.settings import EnvSettings
    from steadyrl.training.cli.checks.isolated import Check, Finding

# Extra → the module that it installs.
MODULES = {"atari": "ale_py", "box2d": "Box2D", "minatar": "minatar", "mujoco": "mujoco"}
MANY = 8  # environments with which backends are measured
PATIENCE = 60.0  # seconds that a check may take beyond env.step_timeout
COMPILING = 300.0  # the same where machine code is compiled
INDENT = 19
BATCH_ONLY = "left out: it steps in batches, without a single environment to look at"


class Preset(NamedTuple):
    """A file of configs/env."""

    name: str
    id: str
    extra: str  # "": none
    about: str

    @property
    def ready(self) -> bool:
        """Whether its extra is installed."""
        return not self.extra or find_module(MODULES.get(self.extra, self.extra)) is not None


def presets(folder: Path) -> Iterator[Preset]:
    """Yield the presets of a folder of configurations."""
    for path in sorted((folder / "env").glob("*.yaml")):
        text = path.read_text("utf-8", errors="replace")
        comment = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
        extra = re.search(r"Needs the extra (\w+)\.\s*", comment)
        about = comment.replace(extra[0], "") if extra else comment
        name = re.search(r"^id: *(\S+)", text, re.M)
        yield Preset(path.stem, name[1] if name else "", extra[1] if extra else "", about.strip())


def list_presets(args: argparse.Namespace) -> None:
    """Print a line for each preset."""
    found = [each for folder in (CONFIGS, args.config_dir) if folder for each in presets(folder)]
    if args.json:
        print(json.dumps([{**each._asdict(), "ready": each.ready} for each in found]))
        return
    width = max(len(each.name) for each in found)
    for each in found:
        state = each.extra if each.ready else f"{each.extra}: no"
        line = f"{each.name:{width}}  {state:11}  {each.about or each.id}"
        print(printable(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1].rstrip()}…"))
    for extra in sorted({each.extra for each in found if not each.ready}):
        print(f"{extra} is missing: {install_command(extra)}")


def settings_of(name: str, overrides: Sequence[str], folder: Path | None) -> EnvSettings:
    """Return the settings of a preset or an id with overrides of `env`."""
    from steadyrl.training.cli.arguments import read
    from steadyrl.training.run.job import compose_one, resolved

    for text in overrides:
        if not text.lstrip("+~").startswith("env."):
            raise CommandError(f"{text}: only keys of the environment: env.…=…")
    folders = [CONFIGS, *([folder] if folder else [])]
    name = name.removeprefix("env.id=").removeprefix("env=")
    known = any((each / "env" / f"{name}.yaml").exists() for each in folders)
    chosen = f"env={name}" if known else f"env.id={name}"
    typed = read([chosen, *overrides]).overrides
    if folder is not None:
        typed.append(as_override("hydra.searchpath", [str(folder.absolute())]))
    try:
        composed = compose_one(typed)
    except Exception as error:
        raise CommandError(explain(error, typed, multirun=False, presets=folder)) from error
    return load_settings(resolved(composed)).run.env


def check(args: argparse.Namespace) -> None:
    """Print what is found; exit with 4 if there is a fault."""
    settings = settings_of(args.name, args.overrides, args.config_dir)
    # Imported here: a wrong name should be refused at once.
    from steadyrl.envs.types import EnvironmentFailedError
    from steadyrl.training.cli.checks.isolated import FAULT

    found = []
    for each in findings(settings):
        found.append(each)
        if not args.json:
            print(printable(line_of(each)), flush=True)
    if args.json:
        print(json.dumps({"id": settings.id, "findings": [each._asdict() for each in found]}))
    faults = sum(each.level == FAULT for each in found)
    if faults:
        many = "a fault" if faults == 1 else f"{faults} faults"
        raise EnvironmentFailedError(f"{settings.id}: {many} found")


@contextmanager
def _silent_log() -> Iterator[None]:
    """Print no warnings of the log."""
    # Not by `propagate`: a log that was never closed restores it whenever it is collected.
    log = logging.getLogger("steadyrl")
    log.addFilter(_nothing)
    try:
        yield
    finally:
        log.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _checks(backend: str, *, batch_only: bool) -> tuple[tuple[str, Check], ...]:
    """Return the checks of an environment by name; `batch_only`: it has no single environments."""
    from steadyrl.training.cli.checks import env_check, simulator_check

    if not batch_only:
        return (
            ("gymnasium", env_check.gymnasium_checks),
            ("episodes", env_check.episodes),
            ("determinism", env_check.determinism),
            ("encoding", env_check.encoding),
        )
    if backend != "batch":
        return ()
    return (
        ("episodes", simulator_check.episodes),
        ("determinism", simulator_check.determinism),
        ("resume", simulator_check.resume),
    )


def findings(settings: EnvSettings) -> Iterator[Finding]:
    """Yield the findings of all checks; raise what keeps the environment from being built."""
    from steadyrl.envs.factory import choose_backend, probe
    from steadyrl.envs.registration import find_spec
    from steadyrl.training.cli.checks import env_check
    from steadyrl.training.cli.checks.isolated import HUNG, NOTE, OK, Finding, isolated

    many = settings if settings.num_envs > 1 else replace(settings, num_envs=MANY)
    try:
        # stdout is the report's; what is warned of is found below.
        with stdout_to_stderr(), warnings.catch_warnings(), _silent_log():
            warnings.simplefilter("ignore")
            spec = probe(many)
            chosen, why = choose_backend(many)
    except SettingError as error:
        raise error.below("env") from None
    seconds = PATIENCE + settings.step_timeout
    batch_only = chosen in ("ale", "envpool") or (
        chosen == "batch" and find_spec(settings.id).entry_point is None
    )
    if batch_only:
        for level, text in env_check.describe_encoding(spec, None, settings.images):
            yield Finding(level, "encoding", text)
    checks = _checks(chosen, batch_only=batch_only)
    if not checks:
        yield Finding(NOTE, "checks", BATCH_ONLY)
    for name, each in checks:
        of_check = isolated(name, each, many if batch_only else settings, seconds)
        yield from of_check
        if any(HUNG in finding.text for finding in of_check):
            yield Finding(NOTE, "checks", "the others were left out: they would hang too")
            return
    yield Finding(OK, "backend", f"{chosen} for {many.num_envs} environments: {why}")
    backend: Any
    for backend in ("kernel", "sync", "async", "batch", "ale", "envpool"):
        measured = replace(many, backend=backend)
        yield from isolated(backend, env_check.speed, measured, seconds + COMPILING)


def line_of(finding: Finding) -> str:
    """Return a finding as text of 80 columns."""
    level = {"ok": "", "absent": "-"}.get(finding.level, finding.level)
    return paragraph(f"{level:6}{finding.check}", one_line(finding.text), INDENT)


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """List presets, or check an environment; errors are printed as one line."""
    parser = documented_parser(__doc__)
    # Without defaults of its own `check` would set options back that were given before it.
    common = ProgramParser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.set_defaults(run=list_presets, json=False, config_dir=None)
    common.add_argument("--json", action="store_true", help="print one line of JSON")
    what = "a folder with presets of your own in env/"
    common.add_argument("--config-dir", type=folder_of_presets, help=what)
    for action in common._actions:
        parser._add_action(action)
    programs = parser.add_subparsers(metavar="check")
    one = programs.add_parser("check", parents=[common], help="check an environment")
    one.add_argument("name", metavar="ID", help="a preset, an id, or module:Id")
    one.add_argument("overrides", nargs="*", metavar="env.KEY=VALUE")
    one.set_defaults(run=check)
    with safe_stdout():
        args = parser.parse_args(arguments)
        args.run(args)
