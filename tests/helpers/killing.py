"""Kill a run with SIGKILL at random times and during saves, and check the damage."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from warm import Process, run, start

from steadyrl.training.checkpoints.archive import TEMPORARY
from steadyrl.training.checkpoints.manifest import FRESH, OLD

POLL = 0.001  # seconds
SKIPPED = "writing a checkpoint takes longer than the interval between two"
CONTINUED = re.compile(r"resumed from step ([\d,]+)")


class Plan(NamedTuple):
    """When to kill: after that many checkpoints, during a save or some seconds later."""

    checkpoints: int
    files: int | None  # files that the save has written; None: not during a save
    seconds: float


def drawn(generator: random.Random, inside: float, starting: float) -> Plan:
    """Draw a plan: with probability `inside` during a save, `starting` before the first one."""
    kind = generator.random()
    if kind < inside:
        return Plan(generator.randrange(1, 3), generator.randrange(7), 0.0)
    if kind < inside + starting:
        return Plan(0, None, generator.uniform(0.0, 1.0))
    return Plan(1, None, generator.uniform(0.0, 0.2))


class Fate(NamedTuple):
    """Outcome of one start of a run."""

    killed: bool
    inside: bool  # a save was incomplete
    continued: int | None  # step it resumed from; None: killed before that, or started over
    newest: int  # step of the newest checkpoint, 0 for none
    logged: int  # last step in the metrics
    skipped: bool  # it warned that saves are skipped, because one takes longer than an interval


class Victim:
    """A run that is started again and again with the same command."""

    def __init__(self, folder: Path, arguments: tuple[str, ...]) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.arguments = folder, arguments
        self.directory = folder / "run"

    def names(self) -> list[str]:
        path = self.directory / "checkpoints"
        return sorted(os.listdir(path)) if path.exists() else []

    def whole(self) -> list[str]:
        return [name for name in self.names() if name.startswith("step-")]

    def half_written(self) -> list[Path]:
        """Return everything that a killed writer may leave behind."""
        kinds = (f"{TEMPORARY}*", f"{FRESH}*", f"{OLD}*", ".*.json-????????", ".*.yaml-????????")
        places = (self.directory, self.directory / "checkpoints")
        return [path for place in places for kind in kinds for path in place.glob(kind)]

    def kill(self, plan: Plan) -> Fate:
        """Start the run, kill it as planned, and return the outcome."""
        begun, before = time.time_ns(), self.whole()
        process = start(self.folder, *self.arguments, quick=False)
        if self._wait(process, plan, set(before)):
            os.kill(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), out + err
        assert "Traceback" not in out + err
        resumed = CONTINUED.search(out)
        if before:
            assert "starting over" not in out
        left = self.half_written()
        if resumed is not None:
            old = [path for path in left if path.stat().st_ctime_ns < begun]
            assert old == [], "a resumed run must remove partial writes of the one before"
        whole = self.whole()
        return Fate(
            process.returncode != 0,
            any(path.parent.name == "checkpoints" for path in left),
            int(resumed[1].replace(",", "")) if resumed else None,
            int(whole[-1].split("-")[1]) if whole else 0,
            self.logged(),
            SKIPPED in out + err,
        )

    def _wait(self, process: Process, plan: Plan, before: set[str]) -> bool:
        """Wait for the planned time; return False if the run ended before it."""
        while len(set(self.whole()) - before) < plan.checkpoints:
            if process.is_over(POLL):
                return False
        if plan.files is None:
            return not process.is_over(plan.seconds)
        while self._files_of_save() < plan.files:
            if process.is_over(POLL):
                return False
        return True

    def _files_of_save(self) -> int:
        """Return the number of files of the save in progress; -1 if there is none."""
        paths = list((self.directory / "checkpoints").glob(f"{TEMPORARY}*"))
        try:
            return max((len(os.listdir(path)) for path in paths), default=-1)
        except FileNotFoundError:  # it was just renamed to its final name
            return -1

    def logged(self) -> int:
        """Return the last completely written step of the metrics."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics without times and memory."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [
            {
                tag: value
                for tag, value in json.loads(line).items()
                if tag == "memory/replay_fill"
                or not tag.startswith(("time/", "memory/", "wall_seconds"))
            }
            for line in lines
        ]

    def finish(self) -> dict[str, Any]:
        """Run to the end; return the summary."""
        summary: dict[str, Any] = run(self.folder, *self.arguments, quick=False)[1]
        assert self.half_written() == []
        return summary
