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
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steadyrl.core.errors import ExpectedError, describe, exit_with
from steadyrl.core.safe_parsing import read_json
from steadyrl.training.logging.terminal import safe_stdout
from steadyrl.training.sweeps.job_run import say
from steadyrl.training.tuning.members import (
    draw_lineage,
    in_the_end,
    member_of,
    read_members,
    train_generation,
)
from steadyrl.training.tuning.population import WHOLE, Plan, read_plan
from steadyrl.training.tuning.search_space import StudyError

TRIES = 5  # of a Ray of our own that breaks off
LOOKS = 5.0  # seconds between two looks at whether Ray still has a node


class LostRayError(Exception):
    """Ray has no node left, and would wait for one for ever."""


def live(config: dict[str, Any], place: str) -> None:
    """Be a member: one generation after the other, from the checkpoint that Ray hands over.

    The population's folder is no part of what Ray keeps: it may be moved meanwhile.
    """
    import tempfile

    from ray import tune  # type: ignore[import-not-found]

    plan, home = config["plan"], Path(place)
    name = f"member-{tune.get_context().get_trial_id().rpartition('_')[2]}"
    generation, parent = 0, None
    given = tune.get_checkpoint()
    if given is not None:
        with given.as_directory() as folder:
            before = member_of(read_json(Path(folder) / "member.json"), home)
        generation, parent = before.generation, before.run_dir
    settings = {key: config[key] for key in plan["space"]}
    settings |= {key: round(settings[key]) for key in WHOLE if key in settings}
    while generation < plan["generations"]:
        generation += 1
        member = train_generation(
            home, name, generation, parent, plan["overrides"], settings, plan["interval"]
        )
        parent = member.run_dir
        # All that Ray keeps is where the run is: our checkpoint is what is handed over.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "member.json").write_text(json.dumps(member.plain(home)))
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
        "space": list(plan.space), "generations": plan.generations,
        "interval": plan.interval, "overrides": plan.overrides,
    }  # fmt: skip


def run(plan: Plan) -> None:
    """Start or continue the population, and say how it ended."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    try:
        import ray  # type: ignore[import-not-found]
        from ray import tune  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        raise StudyError(f'populations need {error.name}: pip install -e ".[ray]"') from None
    # What it reports is told here in lines: its own are tracebacks, and advice to programmers.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="ray")
    for _ in range(TRIES):
        connect(plan)
        try:
            tuner(plan).fit()
            return report(plan)
        except LostRayError:
            if plan.address:
                raise StudyError(
                    f"address={plan.address}: no node is left: start this again to go on"
                ) from None
            say("Ray broke off on this machine")
        finally:
            ray.shutdown()
    raise StudyError(f"Ray broke off {TRIES} times: start this again to go on")


def connect(plan: Plan) -> None:
    """Start Ray on this machine, or join the one there is."""
    import ray  # type: ignore[import-not-found]

    own: dict[str, Any] = {}
    if not plan.address:
        own = {"num_cpus": plan.workers, "include_dashboard": False}
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]),
             os.environ.get("PYTHONPATH", "")])}}  # fmt: skip
    try:
        ray.init(address=plan.address, logging_level=logging.ERROR, log_to_driver=False,
                 runtime_env=paths, **own)  # fmt: skip
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = plan.address or "this machine"
        raise StudyError(f"address={where}: no Ray there: {describe(error)}") from None


def tuner(plan: Plan) -> Any:
    """Return what runs the population, or goes on with it."""
    from ray import tune  # type: ignore[import-not-found]

    there = tune.with_parameters(live, place=str(plan.folder))
    trainable = tune.with_resources(there, {"cpu": 1})
    storage = plan.folder / "ray"
    if tune.Tuner.can_restore(str(storage / plan.name)):
        say("the population goes on where it was")
        return tune.Tuner.restore(
            str(storage / plan.name), trainable, resume_unfinished=True, resume_errored=True
        )
    return tune.Tuner(
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


def progress(plan: Plan) -> Any:
    """Return what prints the population in a line whenever a member ends a generation."""
    from ray.tune import Callback  # type: ignore[import-not-found]

    class Progress(Callback):  # type: ignore[misc]
        looked = time.monotonic()

        def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
            if time.monotonic() > self.looked + LOOKS:
                refuse_to_wait()
                self.looked = time.monotonic()

        def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            say("a member was lost, and goes on from its last generation")

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
        ) -> None:
            members = in_the_end(read_members(plan.folder))
            whole = plan.members * plan.generations
            best = max(members, key=lambda member: member.score)
            say(
                f"population: {len(members)}/{whole} generations of members done, best "
                f"{best.score:.1f} ({best.name}, generation {best.generation}); just now "
                f"{result['score']:.1f} in generation {result['generation']}",
            )

    return Progress()


def refuse_to_wait() -> None:
    """End what would wait for a node that does not come back."""
    import ray  # type: ignore[import-not-found]

    try:
        alive = any(node["Alive"] for node in ray.nodes())
    except Exception as error:  # of connections, of several libraries
        raise LostRayError from error
    if not alive:
        raise LostRayError


def report(plan: Plan) -> None:
    """Say which member is the best, and draw where it comes from."""
    members = read_members(plan.folder)
    if not members:
        raise StudyError(f"{plan.folder}: no member came to the end of a generation")
    last = max(member.generation for member in members)
    if last < plan.generations:
        say(f"ended in generation {last} of {plan.generations}; start it again to go on")
    at_last = [member for member in in_the_end(members) if member.generation == last]
    at_last.sort(key=lambda member: -member.score)
    say("\n| member | score | settings |\n|---|---:|---|\n" + "\n".join(
        f"| {m.name} | {m.score:.1f} | "
        + " ".join(f"{key}={value:.4g}" for key, value in m.settings.items()) + " |"
        for m in at_last
    ))  # fmt: skip
    (plan.folder / "lineage.json").write_text(
        json.dumps([member.plain(plan.folder) for member in members], indent=1) + "\n"
    )
    try:
        draw_lineage(members, plan.folder / "lineage.png")
    except ModuleNotFoundError as error:
        say(f'the lineage is not drawn: needs {error.name}: pip install -e ".[plot]"')
    say(f"\nbest: {at_last[0].run_dir}\nlineage: {plan.folder / 'lineage.png'}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a population, or say in one line why not."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0], epilog="\n".join(lines[2:]))
    parser.add_argument("population", type=Path, metavar="CONFIG.yaml")
    try:
        with safe_stdout():
            args = parser.parse_args(arguments)
        run(read_plan(args.population))
    except ExpectedError as error:
        exit_with(error)
