"""Kill a run with SIGKILL, at random moments and inside of saves, and see what that cost."""

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
CONTINUED = re.compile(r"resumed from step ([\d,]+)")


class Plan(NamedTuple):
    """When to kill: so many checkpoints after the start, inside a save or some time later."""

    checkpoints: int
    files: int | None  # that a save has written; None: not inside a save
    seconds: float


def drawn(generator: random.Random, inside: float, starting: float) -> Plan:
    """Draw a moment: with probability `inside` within a save, with `starting` before the first."""
    kind = generator.random()
    if kind < inside:
        return Plan(generator.randrange(1, 3), generator.randrange(7), 0.0)
    if kind < inside + starting:
        return Plan(0, None, generator.uniform(0.0, 1.0))
    return Plan(1, None, generator.uniform(0.0, 0.2))


class Fate(NamedTuple):
    """What became of one start of a run."""

    killed: bool
    inside: bool  # a save was left half done
    continued: int | None  # from this step; None: it had not come so far, or began anew
    newest: int  # the newest checkpoint then, 0 for none
    logged: int  # the last step in the metrics


class Victim:
    """A run in a folder of its own, started with the same command again and again."""

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
        """Everything that a killed writer can leave behind."""
        kinds = (f"{TEMPORARY}*", f"{FRESH}*", f"{OLD}*", ".*.json-????????", ".*.yaml-????????")
        places = (self.directory, self.directory / "checkpoints")
        return [path for place in places for kind in kinds for path in place.glob(kind)]

    def kill(self, plan: Plan) -> Fate:
        """Start it, kill it as planned, and look at what there is then."""
        begun, before = time.time_ns(), self.whole()
        process = start(self.folder, *self.arguments, quick=False)
        if self._wait(process, plan, set(before)):
            os.kill(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), out + err
        assert "Traceback" not in out + err
        told = CONTINUED.search(out)
        if before:
            assert "starting over" not in out
        left = self.half_written()
        if told is not None:
            old = [path for path in left if path.stat().st_ctime_ns < begun]
            assert old == [], "a start leaves nothing of the run before it half written"
        whole = self.whole()
        return Fate(
            process.returncode != 0,
            any(path.parent.name == "checkpoints" for path in left),
            int(told[1].replace(",", "")) if told else None,
            int(whole[-1].split("-")[1]) if whole else 0,
            self.logged(),
        )

    def _wait(self, process: Process, plan: Plan, before: set[str]) -> bool:
        """Wait for the planned moment; False if the run ended before it."""
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
        """Return how many files the save under way has; -1 if there is none."""
        paths = list((self.directory / "checkpoints").glob(f"{TEMPORARY}*"))
        try:
            return max((len(os.listdir(path)) for path in paths), default=-1)
        except FileNotFoundError:  # it has just got its final name
            return -1

    def logged(self) -> int:
        """Return the last step in the metrics that is written wholly."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def metrics(self) -> list[dict[str, float]]:
        """Return what was logged, but for times and memory."""
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
        """Let it run to its end; return its summary."""
        summary: dict[str, Any] = run(self.folder, *self.arguments, quick=False)[1]
        assert self.half_written() == []
        return summary
