"""Train a population on Ray Tune: python scripts/population.py CONFIG.yaml

Population based training (Jaderberg et al. 2017), or plain evolution: after each generation bad
members go on from a copy of a good one, policy and optimiser, with settings changed a little
(docs/SWEEPS.md). Started again it goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memory.errors import ExpectedError, MemoryBudgetError, describe, exit_with
from training.members import draw_lineage, live_one_generation, read_members
from training.search_space import Range, StudyError, check_space, read_space, read_yaml
from training.settings import Job
from training.signals import ended_by_signals

KEYS = {
    "name": ..., "overrides": ..., "space": ..., "members": 8, "generations": 10, "interval": ...,
    "method": "pbt", "quantile": 0.25, "resample": 0.25, "workers": None, "address": None,
    "folder": None,
}  # fmt: skip
METHODS = ("pbt", "evolution")
# Whole numbers that what a run has saved does not depend on; others are numbers with a point.
WHOLE = ("agent.epochs",)
# A run's length grows with every generation: what follows it would start over each time.
CONSTANT = ("anneal_learning_rate", "anneal_clip", "anneal_entropy_coef")
PROCESS = 450_000_000  # bytes of a run besides its replay, as docs/MEMORY.md measures it


class Plan(NamedTuple):
    """A population as its file describes it."""

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


def read_plan(path: Path) -> Plan:
    """Read and check a population; nothing is run for it that cannot be."""
    from memory.process import usable_cores

    values = read_yaml(path, KEYS)
    for key, least in (("members", 2), ("generations", 1), ("interval", 1)):
        if not isinstance(values[key], int) or values[key] < least:
            raise StudyError(f"{path}: {key}={values[key]}: must be {least} or more")
    if values["method"] not in METHODS:
        raise StudyError(f"{path}: method={values['method']}: there are: {', '.join(METHODS)}")
    if not 0 < values["quantile"] <= 0.5:
        raise StudyError(f"{path}: quantile={values['quantile']}: must be above 0, at most 0.5")
    space = read_space(path, values["space"])
    for key, allowed in space.items():
        if allowed.choices or (allowed.whole and key not in WHOLE):
            raise StudyError(
                f"{path}: space.{key}: members go on with what they have saved, which only numbers "
                f"with a point and {', '.join(WHOLE)} leave its meaning"
            )
    overrides = [str(text) for text in values["overrides"]]
    overrides += [f"total_steps={values['interval']}", f"eval.every={values['interval']}"]
    job = check_space(overrides, space)
    overrides.pop(-2)
    agent = job.config["agent"]
    overrides += [f"agent.{key}=false" for key in CONSTANT if key in agent]
    workers = values["workers"] or min(values["members"], usable_cores())
    refuse_too_many(job, workers, values["members"])
    folder = Path(values["folder"] or Path("outputs") / "populations" / str(values["name"]))
    return Plan(
        str(values["name"]), overrides, space, values["members"], values["generations"],
        values["interval"], values["method"], values["quantile"], values["resample"], workers,
        values["address"], folder.absolute(),
    )  # fmt: skip


def refuse_too_many(job: Job, workers: int, members: int) -> None:
    """Refuse members that together do not fit in the memory there is."""
    from memory.budget import available_bytes

    replay = job.config["agent"].get("replay") or {}
    rows = min(int(replay.get("capacity", 0)), job.settings.run.total_steps * members)
    size = 1 if job.spec.dtype == "uint8" else 4
    for length in job.spec.frame_shape:
        size *= length
    needed = (PROCESS + rows * (size + 32)) * workers
    there = available_bytes()
    if needed > there:
        raise MemoryBudgetError(
            f"{workers} members at once need about {needed / 1e9:.1f} GB, available are "
            f"{there / 1e9:.1f} GB: lower workers, or agent.replay.capacity"
        )


def live(config: dict[str, Any]) -> None:
    """Be a member: one generation after the other, from the checkpoint that Ray hands over."""
    import tempfile

    from ray import tune  # type: ignore[import-not-found]

    plan = config["plan"]
    name = f"member-{tune.get_context().get_trial_id().rpartition('_')[2]}"
    generation, parent = 0, None
    given = tune.get_checkpoint()
    if given is not None:
        with given.as_directory() as folder:
            told = json.loads((Path(folder) / "member.json").read_text())
        generation, parent = told["generation"], told["run_dir"]
    settings = {key: config[key] for key in plan["space"]}
    settings |= {key: round(settings[key]) for key in WHOLE if key in settings}
    while generation < plan["generations"]:
        generation += 1
        member = live_one_generation(
            Path(plan["folder"]), name, generation, parent, plan["overrides"], settings,
            plan["interval"],
        )  # fmt: skip
        parent = member.run_dir
        # All that Ray keeps is where the run is: our checkpoint is what is handed over.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "member.json").write_text(json.dumps(member._asdict()))
            tune.report(
                {"score": member.score, "generation": generation},
                checkpoint=tune.Checkpoint.from_directory(folder),
            )


def scheduler(plan: Plan) -> Any:
    """Return Ray's population based training; evolution waits for all and draws nothing anew."""
    from ray import tune  # type: ignore[import-not-found]
    from ray.tune.schedulers import (  # type: ignore[import-not-found]
        PopulationBasedTraining,
    )

    mutations = {
        key: tune.loguniform(a.low, a.high) if a.log else tune.uniform(a.low, a.high)
        for key, a in plan.space.items()
    }
    evolution = plan.method == "evolution"

    def within(config: dict[str, Any]) -> dict[str, Any]:
        for key, allowed in plan.space.items():
            config[key] = min(max(config[key], allowed.low), allowed.high)
        return config

    return PopulationBasedTraining(
        time_attr="generation",
        metric="score",
        mode="max",
        perturbation_interval=1,
        hyperparam_mutations=mutations,
        quantile_fraction=0.5 if evolution else plan.quantile,
        resample_probability=0.0 if evolution else plan.resample,
        custom_explore_fn=within,
        synch=evolution,
        log_config=False,
    )


def told_to_members(plan: Plan) -> dict[str, Any]:
    """Return what every member is told."""
    return {
        "folder": str(plan.folder), "space": list(plan.space), "generations": plan.generations,
        "interval": plan.interval, "overrides": plan.overrides,
    }  # fmt: skip


def run(plan: Plan) -> None:
    """Start or continue the population, and say how it ended."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    try:
        import ray  # type: ignore[import-not-found]
        from ray import tune  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        raise StudyError(f'populations need {error.name}: pip install -e ".[ray]"') from None
    own: dict[str, Any] = {}
    if not plan.address:
        own = {"num_cpus": plan.workers, "include_dashboard": False}
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]),
             os.environ.get("PYTHONPATH", "")])}}  # fmt: skip
    try:
        ray.init(address=plan.address, logging_level=logging.ERROR, log_to_driver=False,
                 runtime_env=paths, **own)  # fmt: skip
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = plan.address or "this machine"
        raise StudyError(f"address={where}: no Ray there: {describe(error)}") from None
    try:
        trainable = tune.with_resources(live, {"cpu": 1})
        storage = plan.folder / "ray"
        if tune.Tuner.can_restore(str(storage / plan.name)):
            print("the population goes on where it was", flush=True)
            tuner = tune.Tuner.restore(
                str(storage / plan.name), trainable, resume_unfinished=True, resume_errored=True
            )
        else:
            tuner = tune.Tuner(
                trainable,
                param_space={"plan": told_to_members(plan)},
                tune_config=tune.TuneConfig(
                    scheduler=scheduler(plan), num_samples=plan.members,
                    max_concurrent_trials=None, reuse_actors=False,
                ),
                run_config=tune.RunConfig(
                    name=plan.name, storage_path=str(storage), verbose=0,
                    failure_config=tune.FailureConfig(max_failures=5),
                    callbacks=[progress(plan)],
                ),
            )  # fmt: skip
        tuner.fit()
    finally:
        ray.shutdown()
    report(plan)


def progress(plan: Plan) -> Any:
    """Return what prints the population in a line whenever a member ends a generation."""
    from ray.tune import Callback  # type: ignore[import-not-found]

    class Progress(Callback):  # type: ignore[misc]
        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
        ) -> None:
            members = read_members(plan.folder)
            whole = plan.members * plan.generations
            best = max(members, key=lambda member: member.score)
            print(
                f"population: {len(members)}/{whole} generations of members done, best "
                f"{best.score:.1f} ({best.name}, generation {best.generation}); just now "
                f"{result['score']:.1f} in generation {result['generation']}",
                flush=True,
            )

    return Progress()


def report(plan: Plan) -> None:
    """Say which member is the best, and draw where it comes from."""
    members = read_members(plan.folder)
    if not members:
        raise StudyError(f"{plan.folder}: no member came to the end of a generation")
    last = max(member.generation for member in members)
    if last < plan.generations:
        print(f"ended in generation {last} of {plan.generations}; start it again to go on")
    at_last = sorted((m for m in members if m.generation == last), key=lambda member: -member.score)
    print("\n| member | score | settings |\n|---|---:|---|\n" + "\n".join(
        f"| {m.name} | {m.score:.1f} | "
        + " ".join(f"{key}={value:.4g}" for key, value in m.settings.items()) + " |"
        for m in at_last
    ))  # fmt: skip
    (plan.folder / "lineage.json").write_text(
        json.dumps([member._asdict() for member in members], indent=1) + "\n"
    )
    try:
        draw_lineage(members, plan.folder / "lineage.png")
    except ModuleNotFoundError as error:
        print(f'the lineage is not drawn: needs {error.name}: pip install -e ".[plot]"')
    print(f"\nbest: {at_last[0].run_dir}\nlineage: {plan.folder / 'lineage.png'}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a population, or say in one line why not."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0], epilog="\n".join(lines[2:]))
    parser.add_argument("population", type=Path, metavar="CONFIG.yaml")
    args = parser.parse_args(arguments)
    try:
        run(read_plan(args.population))
    except ExpectedError as error:
        exit_with(error)


if __name__ == "__main__":
    with ended_by_signals():
        main()
