"""Train a population on Ray Tune: python scripts/population.py CONFIG.yaml

Population based training (Jaderberg et al. 2017), or plain evolution: after each generation, bad
members copy a good one's policy and optimiser state and perturb its hyperparameters
(docs/many-runs.md). Running the command again resumes it.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from steadyrl.core.clock import doing, report_progress
from steadyrl.core.command.typed import install_command
from steadyrl.core.errors import describe, exit_on_error
from steadyrl.core.files import write_atomic
from steadyrl.core.safe_parsing import read_json
from steadyrl.memory.gpu.cards import AT_ONCE, VISIBLE
from steadyrl.training.cli.programs import documented_parser
from steadyrl.training.logging.screen import displayed, find_screen
from steadyrl.training.logging.terminal import safe_stdout, score
from steadyrl.training.sweeps.job_run import say
from steadyrl.training.sweeps.subprocess_run import ALL_CARDS, CARDS
from steadyrl.training.tuning.members import (
    GenerationLog,
    draw_lineage,
    latest_of_each,
    member_of,
    read_members,
    train_generation,
    wait_for_members,
)
from steadyrl.training.tuning.population import WHOLE, PopulationPlan, read_plan
from steadyrl.training.tuning.search_space import StudyError, folder_errors, validate_given

TRIES = 5  # restarts of a local Ray that failed
PLAN = "plan.json"  # in the population's folder
LOOKS = 5.0  # seconds between checks that Ray still has a node


class LostRayError(Exception):
    """Ray has no node left; it would wait for one for ever."""


def train_member(config: dict[str, Any], place: str) -> None:
    """Train one member, generation by generation, from the checkpoint that Ray passes in.

    Paths are relative to `place`, because the population's folder may be moved between starts.
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
        # Ray stores only the path of the run, whose checkpoint the next member resumes from.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "member.json").write_text(json.dumps(member.plain(home)))
            tune.report(
                {"score": member.score, "generation": generation, "folder": place},
                checkpoint=tune.Checkpoint.from_directory(folder),
            )


def scheduler(plan: PopulationPlan) -> Any:
    """Return Ray's PBT scheduler; `evolution` is synchronous and never resamples."""
    from ray import tune  # type: ignore[import-not-found]
    from ray.tune.schedulers import PopulationBasedTraining  # type: ignore[import-not-found]

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


def run(plan: PopulationPlan) -> None:
    """Start or resume the population, and report."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # Ctrl-C ends this program, with 130
    try:
        with doing("loading Ray"):
            import ray  # type: ignore[import-not-found]
            from ray import tune  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        raise StudyError(f"populations need {error.name}: {install_command('ray')}") from None
    # Progress is printed here; Ray's own output is tracebacks and advice.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="ray")
    for _ in range(TRIES):
        with doing("starting Ray" if plan.address is None else f"connecting to {plan.address}"):
            connect(plan)
        try:
            with doing("training the population"):
                errors = tuner(plan).fit().errors
            with doing("drawing the lineage"):
                return report(plan, errors)
        except KeyboardInterrupt:  # Ray raises one of its own
            ray.shutdown()
            with doing("saving the members"):
                wait_for_members(plan.folder)
            raise
        except LostRayError:
            if plan.address:
                raise StudyError(
                    f"address={plan.address}: no node left; run the command again to resume"
                ) from None
            say("Ray lost its node; restarting it")
        finally:
            ray.shutdown()
    raise StudyError(f"Ray failed {TRIES} times; run the command again to resume")


def connect(plan: PopulationPlan) -> None:
    """Start Ray on this machine, or connect to the given address."""
    import ray  # type: ignore[import-not-found]

    own: dict[str, Any] = {}
    variables = {AT_ONCE: str(plan.workers), "PYTHONPATH": os.pathsep.join([
        str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    if not plan.address:
        own = {"num_cpus": plan.workers, "include_dashboard": False}
        # Members get the cards that this process sees. As none asks Ray for a card, it would hide
        # all cards from them, or give all the first.
        variables[CARDS] = os.environ.get(VISIBLE, ALL_CARDS)
    try:
        ray.init(address=plan.address, logging_level=logging.ERROR, log_to_driver=False,
                 runtime_env={"env_vars": variables}, **own)  # fmt: skip
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = plan.address or "this machine"
        raise StudyError(f"address={where}: cannot connect to Ray: {describe(error)}") from None


def tuner(plan: PopulationPlan) -> Any:
    """Return a Tuner that starts the population, or resumes it."""
    from ray import tune  # type: ignore[import-not-found]

    there = tune.with_parameters(train_member, place=str(plan.folder))
    trainable = tune.with_resources(there, {"cpu": 1})
    storage = plan.folder / "ray"
    if tune.Tuner.can_restore(str(storage / plan.name)):
        validate_same(plan)
        say("resuming the population")
        return tune.Tuner.restore(
            str(storage / plan.name), trainable, resume_unfinished=True, resume_errored=True
        )
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(plan.folder / PLAN, json.dumps({"digest": plan.digest}) + "\n")
    return tune.Tuner(
        trainable,
        param_space={"plan": {
            "space": list(plan.space), "generations": plan.generations,
            "interval": plan.interval, "overrides": plan.overrides,
        }},
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


def validate_same(plan: PopulationPlan) -> None:
    """Raise StudyError if the population in the folder was started with other settings."""
    begun = plan.folder / PLAN
    if begun.exists() and read_json(begun) != {"digest": plan.digest}:
        raise StudyError(
            f"{plan.folder}: has another population named {plan.name} (other overrides or "
            "ranges, or another number of members or generations); choose another name or folder"
        )


def progress(plan: PopulationPlan) -> Any:
    """Return a callback that prints a line for each generation that all members have ended."""
    from ray.tune import Callback  # type: ignore[import-not-found]

    class Progress(Callback):  # type: ignore[misc]
        looked = time.monotonic()
        generations = GenerationLog(plan.members, plan.generations)

        def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
            # A restored callback brings its time along, of before a restart of the machine.
            if not self.looked <= time.monotonic() <= self.looked + LOOKS:
                check_nodes()
                self.looked = time.monotonic()

        def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            say("a member was lost; resuming it from its last generation")

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
        ) -> None:
            # Not `plan.folder`: Ray restores this object with the plan it had before a move.
            members = read_members(Path(result["folder"]))
            for line in self.generations.lines(members):
                say(line)
            best = max(members, key=lambda member: member.score)
            report_progress(
                f"{len(latest_of_each(members))} of {plan.members * plan.generations} generations "
                f"of members, best {score(best.score)}"
            )

    return Progress()


def check_nodes() -> None:
    """Raise LostRayError if Ray has no living node.

    Ray itself notices a dead node only after 20 s or so, and then ends this process.
    """
    import ray  # type: ignore[import-not-found]

    own = [child for child in psutil.Process().children() if child.name() == "raylet"]
    if own and all(child.status() == psutil.STATUS_ZOMBIE for child in own):
        raise LostRayError
    try:
        alive = any(node["Alive"] for node in ray.nodes())
    except Exception as error:  # connection errors of several libraries
        raise LostRayError from error
    if not alive:
        raise LostRayError


def report(plan: PopulationPlan, errors: Sequence[BaseException] = ()) -> None:
    """Print the final members, best first, and plot the lineage; raise if they did not finish."""
    members = read_members(plan.folder)
    reasons = [describe(getattr(error, "cause", None) or error) for error in errors]
    if not members:
        raise StudyError(f"{plan.folder}: no member finished a generation").with_details(*reasons)
    last = max(member.generation for member in members)
    at_last = [member for member in latest_of_each(members) if member.generation == last]
    at_last.sort(key=lambda member: -member.score)
    say("\n| member | score | settings |\n|---|---:|---|\n" + "\n".join(
        f"| {m.name} | {score(m.score)} | "
        + " ".join(f"{key}={value:.4g}" for key, value in m.settings.items()) + " |"
        for m in at_last
    ))  # fmt: skip
    lineage = [member.plain(plan.folder) for member in members]
    write_atomic(plan.folder / "lineage.json", json.dumps(lineage, indent=1) + "\n")
    try:
        draw_lineage(members, plan.folder / "lineage.png")
    except ModuleNotFoundError as error:
        say(f"cannot plot the lineage: needs {error.name}: {install_command('plot')}")
    say(f"\nbest: {at_last[0].run_dir}\nlineage: {plan.folder / 'lineage.png'}")
    if last < plan.generations:
        raise StudyError(
            f"ended in generation {last} of {plan.generations}; run the command again to resume"
        ).with_details(*reasons)
    for reason in reasons:
        say(f"a member failed: {reason}")


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Train a population; errors are printed as one line."""
    parser = documented_parser(__doc__)
    parser.add_argument("population", type=Path, metavar="CONFIG.yaml", nargs="?")
    with safe_stdout():
        args = parser.parse_args(arguments)
    with displayed(find_screen(), total=0):
        with doing("reading the population"):
            plan = read_plan(validate_given(args.population, "population", "population.yaml"))
        with folder_errors(plan.folder):
            run(plan)
