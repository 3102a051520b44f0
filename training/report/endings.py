"""How a run ended: its status, exit code, the reason in its log, and the commands that follow."""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import MemoryBudgetError, NonFiniteError, one_line
from steadyrl.core.files import read_lines, read_tail
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.training.analysis.past_runs import PastRun
from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.checkpoints.resume import modules
from steadyrl.training.checkpoints.run_directory import (
    LAST,
    RunDirectoryLostError,
    resume_command,
)
from steadyrl.training.checkpoints.unsaved import UnsavedError
from steadyrl.training.config.overrides import as_override
from steadyrl.training.report.killed import memory_near_limit

LOG = "train.log"
LOG_BYTES = 64_000  # that are read, of the log's end
TRACEBACK = "Traceback (most recent call last)"
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
WARNING = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S* (WARN|ERR)")
LONGEST_LINE = 10_000  # bytes
ERROR = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")
# What a failed run exited with, by the error in its log.
CODES = {
    error.__name__: error.exit_code
    for error in (
        CheckpointError,
        EnvironmentFailedError,
        MemoryBudgetError,
        NonFiniteError,
        RunDirectoryLostError,
        UnsavedError,
    )
} | {"CallbackError": 4, "PeerLostError": 8}  # of packages above this one
OF_ENVIRONMENT = re.compile(r"[\w ]+ of (?:evaluation's )?environment \d")  # NaN that it gave
HIGHER_LIMIT = re.compile(r"(memory\.limit_mb=\d+) or more")  # at which the run can go on
RUNNING, KILLED = "running", "killed"
MOST_WARNINGS = 5


class Step(NamedTuple):
    """A command, and what it is for."""

    what: str
    command: str


class Ending(NamedTuple):
    """How a run ended."""

    status: str  # of its summary, or RUNNING, or KILLED: it left no summary
    exit_code: str
    reason: str  # "" if there is nothing to explain
    warnings: list[str]  # the newest of its log
    following: list[Step]


def ending(run: PastRun) -> Ending:
    """Return how a run ended, from its summary, lock and log."""
    log = _log(run.path)
    status = RUNNING if run.is_running else one_line(str(run.summary.get("status", KILLED)))
    name, message = _last_error(log) if status in ("failed", "diverged") else ("", "")
    return Ending(
        status,
        _exit_code(status, name),
        _reason(run.path, status, message),
        _warnings(run.path),
        _next(run, status, message),
    )


def _exit_code(status: str, error: str) -> str:
    return {
        "finished": "0",
        "interrupted": "128 + the signal: 130 (Ctrl-C), 143 (SIGTERM), 129 (a closed terminal)",
        "diverged": str(NonFiniteError.exit_code),
        "failed": str(CODES.get(error, "")),
    }.get(status, "")


def _reason(path: Path, status: str, message: str) -> str:
    if status == RUNNING:
        return "Still running: this is its state so far."
    if status == KILLED:
        reason = "It left no summary: it was killed, or its machine went down"
        memory = memory_near_limit(path)
        return f"{reason}." if memory is None else f"{reason}; {memory}."
    return message


def _next(run: PastRun, status: str, message: str) -> list[Step]:
    """Return what to do next, the most useful first."""
    place = shlex.quote(str(run.path))
    named = _modules(run.config)
    again = resume_command(run.path, *named)
    options = [f" --env {shlex.quote(text[4:])}" for text in named if text.startswith("env.")]
    evaluate = "".join([f"{command_of('evaluate')} {place}", *options])
    steps = run.summary.get("steps")
    if status == RUNNING:
        return [Step("watch it", f"tensorboard --logdir {place}")]
    if status == "finished":
        found = [
            Step("score the policy on more episodes", f"{evaluate} --episodes 100"),
            Step("film an episode", f"{evaluate} --video film.mp4"),
        ]
        if isinstance(steps, int) and steps > 0:
            found.append(Step("train on", f"{again} total_steps={2 * steps}"))
        return found if (run.path / LAST).is_dir() else found[2:]
    if status == "diverged" and OF_ENVIRONMENT.match(message):
        check = f"{command_of('envs')} check {shlex.quote(run.env)}"
        return [
            Step("find the fault in the environment", check),
            Step("continue from the last good checkpoint", again),
        ]
    if status == "diverged":
        rate = run.config.get("agent.learning_rate")
        now = f" (it was {rate})" if isinstance(rate, float) else ""
        return [
            Step(f"start again with a lower learning rate{now}", "agent.learning_rate=…"),
            Step("or continue from the last good checkpoint", again),
        ]
    raised = HIGHER_LIMIT.search(message)
    again += f" {raised[1]}" if raised else ""
    found = [Step("continue it from its last checkpoint", again)]
    if status == "failed":
        found.append(Step("see its log", f"tail -n 40 {shlex.quote(str(run.path / LOG))}"))
    return found


def _modules(config: Mapping[str, Any]) -> list[str]:
    """Return the overrides that name modules of the user again: no saved file may import them."""
    saved = {
        "env": {"id": config.get("env.id"), "wrappers": config.get("env.wrappers")},
        "agent": {"teacher": {"policy": config.get("agent.teacher.policy")}},
        "callbacks": config.get("callbacks"),
    }
    keys = dict.fromkeys(key for key, _ in modules(saved))
    return [as_override(key, config[key]) for key in keys]


def _log(path: Path) -> list[str]:
    try:
        return read_tail(path / LOG, LOG_BYTES).splitlines()
    except OSError:
        return []


def _warnings(path: Path) -> list[str]:
    """Return the messages of the newest warnings and errors, however much was logged since."""
    try:
        lines = (line for line, _ in read_lines(path / LOG, LONGEST_LINE))
        found = deque((line for line in lines if WARNING.match(line)), MOST_WARNINGS)
    except OSError:
        return []
    texts = (line.decode(errors="replace").rstrip() for line in found)
    return [one_line(text.split(" ", 3)[-1]) for text in texts]


def _last_error(log: list[str]) -> tuple[str, str]:
    """Return class name and message of the last traceback; empty if the log has none."""
    begins = [at for at, line in enumerate(log) if line.startswith(TRACEBACK)]
    for line in log[begins[-1] + 1 :] if begins else ():
        if TIME.match(line):
            break
        if line[:1].isspace() or not (found := ERROR.fullmatch(line)):
            continue
        name = found[1].rpartition(".")[2]
        return name, one_line(found[2] or name)
    return "", ""
