"""Members of a population: each generation is a run that resumes from its parent's checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from steadyrl.core.errors import ExpectedError, describe
from steadyrl.core.files import Files, write_atomic
from steadyrl.core.safe_parsing import read_json
from steadyrl.memory.process import MB, readable
from steadyrl.training.analysis.pictures import save_figure
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    manifest_metadata,
    part_names,
    saved_below,
)
from steadyrl.training.checkpoints.run_directory import CHECKPOINTS, read_summary
from steadyrl.training.logging.terminal import score
from steadyrl.training.sweeps.subprocess_run import RunProcess, logged_error, wait_until_free
from steadyrl.training.tuning.search_space import job_of, typed

KEEP_GENERATIONS = 2  # before the current one, with checkpoints; no member resumes from older ones


class MemberError(ExpectedError):
    """A member's run did not finish its generation, or what it has written cannot be read."""

    exit_code = 2


class Member(NamedTuple):
    """A member at the end of a generation: score, hyperparameters and parent."""

    name: str
    generation: int
    score: float
    settings: dict[str, Any]
    parent: str | None  # run it resumed from: its own last generation, unless it was replaced
    run_dir: str

    def plain(self, folder: Path) -> dict[str, Any]:
        """Return JSON values, with run directories relative to `folder`, which may be moved."""
        places = {"parent": _below(folder, self.parent), "run_dir": _below(folder, self.run_dir)}
        return {**self._asdict(), **places}


def member_of(plain: Mapping[str, Any], folder: Path) -> Member:
    """Rebuild a Member from `Member.plain`'s values."""
    member = Member(**plain)
    parent = None if member.parent is None else str(folder / member.parent)
    return member._replace(parent=parent, run_dir=str(folder / member.run_dir))


def _below(folder: Path, run: str | None) -> str | None:
    return None if run is None else os.path.relpath(run, folder)


def train_generation(
    folder: Path,
    name: str,
    generation: int,
    parent: str | None,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
    steps: int,
) -> Member:
    """Train a member for one generation from its parent's checkpoint; resume it if interrupted."""
    # A replaced member may train a generation twice, with different parents.
    lineage = json.dumps([_below(folder, parent), dict(settings)])
    kind = hashlib.sha256(lineage.encode()).hexdigest()[:6]
    place = folder / f"generation-{generation:03d}" / f"{name}-{kind}"
    own = [*overrides, *(typed(key, value) for key, value in settings.items())]
    own += [f"total_steps={steps * generation}"]
    wait_until_free(place)
    if parent is not None and not (place / "config.yaml").exists():
        fork_checkpoint(Path(parent), place, job_of(own, place).config)
    place.mkdir(parents=True, exist_ok=True)
    with (place / "out.log").open("ab") as output:
        child = RunProcess(own, place, output=output.fileno(), threads=1)
        outcome = child.wait()
    if outcome.status != "finished" or outcome.score is None:
        why = outcome.error or logged_error(place / "out.log")
        raise MemberError(f"{name}, generation {generation}: {outcome.status}: {why}")
    member = Member(name, generation, outcome.score, dict(settings), parent, str(place))
    write_atomic(place / "member.json", json.dumps(member.plain(folder)) + "\n")
    old = folder / f"generation-{generation - KEEP_GENERATIONS - 1:03d}"
    for checkpoints in old.glob(f"{name}-*/checkpoints"):
        shutil.rmtree(checkpoints, ignore_errors=True)
    return member


def wait_for_members(folder: Path) -> None:
    """Wait until the members' runs have saved and ended: a scheduler kills all that is left."""
    for place in folder.glob("generation-*/*"):
        wait_until_free(place)


def read_members(folder: Path) -> list[Member]:
    """Return all finished generations of all members, oldest first."""
    found = list(folder.glob("generation-*/*/member.json"))
    found.sort(key=lambda path: path.stat().st_mtime_ns)
    try:
        return [member_of(read_json(path), folder) for path in found]
    except (OSError, ValueError, TypeError) as error:
        raise MemberError(f"{folder}: a member.json cannot be read: {describe(error)}") from None


def latest_of_each(members: Sequence[Member]) -> list[Member]:
    """Return each member's generations once; of a repeated one the later."""
    return list({(member.name, member.generation): member for member in members}.values())


class GenerationLog:
    """Says how each generation went, once all members have ended it."""

    def __init__(
        self, members: int, generations: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._members, self._generations, self._clock = members, generations, clock
        self._said: int | None = None
        self._begun = clock()
        self._seconds: list[float] = []
        self._restored = False  # the generation under way began before a restart

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray restores it with a population that goes on: in another process, with another clock.
        return type(self), (self._members, self._generations), {"_restored": True}

    def lines(self, found: Sequence[Member]) -> list[str]:
        """Return a line for each generation that the newest of these members has completed."""
        if self._said is None:
            self._said = self._complete(found[:-1])  # said before the population went on
        lines = []
        while self._said < self._complete(found):
            self._said += 1
            taken = self._take_seconds()
            ended = [m for m in latest_of_each(found) if m.generation == self._said]
            scores = [member.score for member in ended]
            peaks = [
                read_summary(Path(member.run_dir)).get(key, 0.0)
                for member in ended
                for key in ("tree_mb_peak", "rss_mb_peak")
            ]
            lines.append(
                f"generation {self._said}/{self._generations}: {taken}, "
                f"best score {score(max(scores))} (mean {score(fmean(scores))}), "
                f"RAM {readable(max(peaks) * MB)}"
            )
        return lines

    def _take_seconds(self) -> str:
        now, begun, restored = self._clock(), self._begun, self._restored
        self._begun, self._restored = now, False
        if restored:
            return f"{now - begun:,.0f} s since the restart"
        self._seconds.append(now - begun)
        return f"{now - begun:,.0f} s (mean {fmean(self._seconds):,.0f} s)"

    def _complete(self, found: Sequence[Member]) -> int:
        ended = Counter(member.generation for member in latest_of_each(found))
        return next(g for g in count() if ended[g + 1] < self._members)


def ancestors(members: Sequence[Member], last: Member) -> list[Member]:
    """Return a member's line of descent, first generation first."""
    known = {member.run_dir: member for member in members}
    line = [last]
    while line[-1].parent in known:
        line.append(known[line[-1].parent or ""])
    return line[::-1]


def draw_lineage(members: Sequence[Member], out: Path) -> None:
    """Plot scores over generations, each joined to its parent; the best member's line is bold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    known = {member.run_dir: member for member in members}
    last = max(member.generation for member in members)
    at_last = (m for m in latest_of_each(members) if m.generation == last)
    best = max(at_last, key=lambda member: member.score)
    line = {member.run_dir for member in ancestors(members, best)}
    for member in members:
        parent = known.get(member.parent or "")
        bold = member.run_dir in line
        colour = "#D55E00" if bold else "#0072B2"
        if parent is not None:
            copied = parent.name != member.name
            axes.plot(
                [parent.generation, member.generation], [parent.score, member.score],
                ":" if copied else "-", color=colour, alpha=1 if bold else 0.5,
                linewidth=2 if bold else 1,
            )  # fmt: skip
        axes.plot(member.generation, member.score, "o", color=colour, markersize=4)
    axes.set_xlabel("generation")
    axes.set_ylabel("evaluated return")
    axes.set_title("dotted: copied from another member; orange: line of the best member")
    save_figure(figure, out)


def fork_checkpoint(source: Path, target: Path, config: Mapping[str, Any]) -> int:
    """Link `source`'s newest valid checkpoint into `target` with a new config; return its step.

    Files are hard links. Whether the configuration fits the state is checked on resume.
    """
    from steadyrl.training.checkpoints.archive import Existing, write_archive  # imports torch

    reasons = []
    for saved in saved_below(source / CHECKPOINTS):
        try:
            metadata, parts = manifest_metadata(saved.path), sorted(part_names(saved.path))
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        whole = target / CHECKPOINTS / saved.path.name
        if not whole.exists():
            whole.parent.mkdir(parents=True, exist_ok=True)
            metadata |= {"config": dict(config), "eval_return_mean": None}
            links = [(name, Existing(saved.path, name)) for name in parts]
            write_archive(Files(), whole, links, metadata)
        return saved.step
    raise CheckpointError("; ".join(reasons) or f"{source}: no checkpoint to resume from")
