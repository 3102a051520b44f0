"""Read and check the YAML file of a population, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from steadyrl.core.errors import MemoryBudgetError, SettingError
from steadyrl.memory.budget import available_bytes
from steadyrl.memory.process import usable_cores
from steadyrl.training.config.settings import Job
from steadyrl.training.sweeps.identity import digest
from steadyrl.training.tuning.search_space import (
    Range,
    StudyError,
    check_space,
    job_of,
    read_folder,
    read_name,
    read_space,
    read_study,
)

KEYS = {
    "name": ..., "overrides": ..., "space": ..., "members": 8, "generations": 10, "interval": ...,
    "method": "pbt", "quantile": 0.25, "resample": 0.25, "workers": None, "address": None,
    "folder": None,
}  # fmt: skip
KINDS = {
    "name": str, "overrides": list, "space": dict, "interval": int, "workers": int, "address": str,
    "folder": str,
}  # fmt: skip
METHODS = ("pbt", "evolution")
# Integer keys that may change on resume; all other searched keys must be floats.
WHOLE = ("agent.epochs",)
# total_steps grows with every generation, which would restart these schedules each time.
CONSTANT = ("anneal_learning_rate", "anneal_clip", "anneal_entropy_coef")
PROCESS = 450_000_000  # bytes of a run without its replay (docs/memory.md)


class PopulationPlan(NamedTuple):
    """A population as described by its file."""

    name: str
    overrides: list[str]
    space: dict[str, Range]
    members: int
    generations: int
    interval: int
    method: str
    quantile: float
    resample: float
    workers: int
    address: str | None
    folder: Path

    @property
    def digest(self) -> str:
        """Hash of everything that must be equal when a population is resumed."""
        return digest(self._replace(workers=0, address=None, folder=Path())._asdict())


def read_plan(path: Path) -> PopulationPlan:
    """Read and check a population file."""
    values = read_study(path, KEYS, KINDS)
    name = read_name(path, values["name"])
    for key, least in (("members", 2), ("generations", 1), ("interval", 1), ("workers", 1)):
        if values[key] is not None and values[key] < least:
            raise StudyError(f"{path}: {key}={values[key]}: must be {least} or more")
    if values["method"] not in METHODS:
        raise StudyError(f"{path}: method={values['method']}: must be one of {', '.join(METHODS)}")
    if not 0 < values["quantile"] <= 0.5:
        raise StudyError(f"{path}: quantile={values['quantile']}: must be above 0, at most 0.5")
    if not 0 <= values["resample"] <= 1:
        raise StudyError(f"{path}: resample={values['resample']}: must be between 0 and 1")
    folder = read_folder(path, values["folder"], Path("outputs") / "populations" / name)
    space = read_space(path, values["space"])
    overrides = [str(text) for text in values["overrides"]]
    overrides.append(f"eval.every={values['interval']}")  # at the end of each generation
    # `total_steps` is set for each generation.
    steps = f"total_steps={values['interval']}"
    agent = job_of([*overrides, steps], folder).config["agent"]
    overrides += [f"agent.{key}=constant" for key in CONSTANT if key in agent]
    try:  # with all that its members get
        job, space = check_space([*overrides, steps], space, folder)
    except SettingError as error:
        raise StudyError(f"{path}: populations have no schedules: {error}") from None
    for key, allowed in space.items():
        if allowed.choices or (allowed.whole and key not in WHOLE):
            raise StudyError(
                f"{path}: space.{key}: members resume from checkpoints, so only floats "
                f"and {', '.join(WHOLE)} may be searched"
            )
    workers = values["workers"]
    if workers is None:
        workers = min(values["members"], usable_cores())
    workers = min(workers, values["members"])
    validate_memory(job, workers, values["interval"] * values["generations"])
    return PopulationPlan(
        name, overrides, space, values["members"], values["generations"], values["interval"],
        values["method"], values["quantile"], values["resample"], workers, values["address"],
        folder,
    )  # fmt: skip


def validate_memory(job: Job, workers: int, steps: int) -> None:
    """Raise MemoryBudgetError if parallel members do not fit in memory after `steps` steps."""
    replay = job.config["agent"].get("replay") or {}
    rows = min(int(replay.get("capacity", 0)), steps)
    size = 1 if job.spec.dtype == "uint8" else 4
    for length in job.spec.frame_shape:
        size *= length
    needed = (PROCESS + rows * (size + 32)) * workers
    there = available_bytes()
    if needed > there:
        raise MemoryBudgetError(
            f"{workers} parallel members need about {needed / 1e9:.1f} GB, available: "
            f"{there / 1e9:.1f} GB. Lower workers or agent.replay.capacity"
        )
