"""Tune hyperparameters with Optuna: python scripts/tune.py STUDY.yaml, in one or more terminals.

The file lists fixed settings, the search space and the method (docs/many-runs.md). Running it
again, or in another terminal, continues the same study; interrupted trials resume from checkpoints.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steadyrl.core.clock import doing, report_progress
from steadyrl.core.command.typed import install_command
from steadyrl.core.errors import describe, exit_on_error, show
from steadyrl.core.files import lock, open_regular
from steadyrl.training.analysis.past_runs import read_metrics
from steadyrl.training.checkpoints.run_directory import read_summary
from steadyrl.training.cli.programs import documented_parser
from steadyrl.training.config.settings import CONFIGS
from steadyrl.training.logging.screen import displayed, find_screen
from steadyrl.training.logging.terminal import safe_stdout, score
from steadyrl.training.sweeps.job_run import say
from steadyrl.training.sweeps.progress import time_left
from steadyrl.training.sweeps.subprocess_run import Outcome, logged_error, running
from steadyrl.training.tuning.results import MADE_BY, StudyPlan, write_results
from steadyrl.training.tuning.search_space import (
    Range,
    StudyError,
    check_space,
    folder_errors,
    read_folder,
    read_name,
    read_space,
    read_study,
    typed,
    validate_given,
)

if TYPE_CHECKING:
    import optuna  # type: ignore[import-not-found]

KEYS = {
    "name": ..., "overrides": ..., "space": ..., "trials": 40, "seeds": [0, 1],
    "check_seeds": [1000, 1001, 1002, 1003, 1004], "sampler": "tpe", "pruner": "asha",
    "storage": None, "folder": None,
}  # fmt: skip
KINDS = {"name": str, "overrides": list, "space": dict, "storage": str, "folder": str}
SCORE = "eval/return_mean"
EVERY = 0.5  # seconds between checks of a trial's runs
TRIES = 3  # attempts of a trial whose runs are killed
CUT_SHORT = ("killed", "interrupted", "in use")


def read_plan(path: Path) -> StudyPlan:
    """Read and check a study file."""
    values = read_study(path, KEYS, KINDS)
    name = read_name(path, values["name"])
    folder = read_folder(path, values["folder"], Path("outputs") / "tuning" / name)
    space = read_space(path, values["space"])
    for key, known in (("sampler", ("tpe", "random")), ("pruner", tuple(PRUNERS))):
        if values[key] not in known:
            raise StudyError(f"{path}: {key}={values[key]}: must be one of {', '.join(known)}")
    if not values["seeds"] or not values["trials"]:
        raise StudyError(f"{path}: seeds and trials: at least one of each is needed")
    for key in ("seeds", "check_seeds"):
        if len(set(map(str, values[key]))) < len(values[key]):
            raise StudyError(f"{path}: {key}={show(values[key])}: has a seed twice")
        if any(type(seed) is not int or seed < 0 for seed in values[key]):
            raise StudyError(f"{path}: {key}={show(values[key])}: must be integers >= 0")
    if both := sorted({*values["seeds"]} & {*values["check_seeds"]}):
        raise StudyError(
            f"{path}: check_seeds={show(values['check_seeds'])}: seed {both[0]} is one of seeds, "
            "which chose the best: check it with others"
        )
    overrides = [str(text) for text in values["overrides"]]
    job, space = check_space(overrides, space, folder)
    settings = job.settings.run
    if not settings.eval.every:
        raise StudyError(f"{path}: eval.every=0: must be above 0: trials are scored by evaluations")
    plan = StudyPlan(
        name, overrides, space, values["trials"], values["seeds"], values["check_seeds"], folder,
        str(values["storage"] or folder / "journal.log"), values["sampler"], values["pruner"],
        max(1, settings.total_steps // settings.eval.every),
    )  # fmt: skip
    validate_preset_name(path, plan)
    return plan


def validate_preset_name(path: Path, plan: StudyPlan) -> None:
    """Raise StudyError if the preset's name is taken by a preset that is not this study's."""
    ours, own = CONFIGS / "experiment" / plan.preset.name, plan.preset
    if ours.exists():
        raise StudyError(
            f"{path}: name={plan.name}: {ours} is an existing preset; choose another name"
        )
    there = own.read_text(errors="replace") if own.exists() else ""  # empty: an old one, cut off
    if there and f"{MADE_BY}: {plan.name}\n" not in there:
        raise StudyError(
            f"{path}: name={plan.name}: {own} is an existing preset; choose another name"
        )


PRUNERS: dict[str, Any] = {
    "asha": lambda o, n: o.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    "hyperband": lambda o, n: o.pruners.HyperbandPruner(
        min_resource=1, max_resource=n, reduction_factor=3
    ),
    "median": lambda o, n: o.pruners.MedianPruner(n_warmup_steps=1),
    "none": lambda o, n: o.pruners.NopPruner(),
}


def open_study(plan: StudyPlan) -> optuna.Study:
    """Open or create the study; raise StudyError if another study has its name."""
    try:
        with doing("loading Optuna"):
            import optuna  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        raise StudyError(f"tuning needs {error.name}: {install_command('tune')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        plan.preset.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"folder={plan.folder}: cannot be used: {describe(error)}") from None
    # Unseeded: which terminal gets which trial is random anyway.
    sampler = (
        optuna.samplers.TPESampler(multivariate=True, constant_liar=True)
        if plan.sampler == "tpe"
        else optuna.samplers.RandomSampler()
    )
    try:
        storage: Any = plan.storage
        if "://" not in plan.storage:
            from optuna.storages.journal import JournalFileBackend  # type: ignore[import-not-found]

            storage = optuna.storages.JournalStorage(JournalFileBackend(plan.storage))
        study = optuna.create_study(
            study_name=plan.name,
            storage=storage,
            sampler=sampler,
            pruner=PRUNERS[plan.pruner](optuna, plan.evaluations),
            direction="maximize",
            load_if_exists=True,
        )
        known = study.user_attrs.get("steadyrl")
        if known is None and not study.trials:
            study.set_user_attr("steadyrl", plan.digest)
            known = plan.digest
    except Exception as error:  # database, disk, or not a journal
        raise StudyError(f"storage={plan.storage}: cannot be used: {describe(error)}") from error
    if known != plan.digest:
        raise StudyError(
            f"storage={plan.storage}: has another study named {plan.name} (other overrides, "
            "space or seeds); choose another name or storage"
        )
    return study


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a file; yield False if another process has locked it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        yield lock(file.fileno(), wait=wait)


def work(plan: StudyPlan, study: optuna.Study) -> None:
    """Run trials until there are enough, interrupted ones first."""
    while True:
        with locked(plan.folder / ".planning", wait=True):
            trial, file = next_trial(plan, study)
        if trial is None or file is None:
            return
        try:
            with doing(f"trial {trial.number} ({trial.number + 1} of {plan.trials})"):
                run_trial(plan, study, trial)
        finally:
            os.close(file)
        say_progress(plan, study)


def next_trial(plan: StudyPlan, study: optuna.Study) -> tuple[optuna.Trial | None, int | None]:
    """Return a trial and its lock, held until this process ends."""
    import optuna  # type: ignore[import-not-found]

    running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    for frozen in running:
        file = lock_trial(plan, frozen.number)
        if file is not None:
            say(f"trial {frozen.number} was interrupted: resuming it")
            return optuna.Trial(study, frozen._trial_id), file
    if len(study.get_trials(deepcopy=False)) >= plan.trials:
        return None, None
    trial = study.ask()
    return trial, lock_trial(plan, trial.number)


def lock_trial(plan: StudyPlan, number: int) -> int | None:
    """Lock a trial's directory; return None if another process has locked it."""
    path = plan.folder / "trials" / str(number)
    path.mkdir(parents=True, exist_ok=True)
    file = open_regular(path / ".lock", os.O_RDWR | os.O_CREAT)
    if lock(file):
        return file
    os.close(file)
    return None


def trial_values(trial: optuna.Trial, space: Mapping[str, Range]) -> dict[str, Any]:
    """Return a trial's values; a resumed trial gets its earlier ones."""
    found: dict[str, Any] = {}
    for key, allowed in space.items():
        if allowed.choices:
            texts = _texts(allowed.choices)
            found[key] = allowed.choices[texts.index(trial.suggest_categorical(key, texts))]
        elif allowed.whole:
            found[key] = trial.suggest_int(
                key, int(allowed.low), int(allowed.high), log=allowed.log
            )
        else:
            found[key] = trial.suggest_float(key, allowed.low, allowed.high, log=allowed.log)
    return found


def _texts(choices: Sequence[Any]) -> list[str]:
    """Return choices as text, because Optuna's are scalars; lists in short, if those differ."""
    whole = [typed("", choice)[1:] for choice in choices]
    short = [
        str(show(choice)) if isinstance(choice, list | dict) else text
        for choice, text in zip(choices, whole, strict=True)
    ]
    return short if len(set(short)) == len(short) else whole


def run_trial(plan: StudyPlan, study: optuna.Study, trial: optuna.Trial) -> None:
    """Run a trial to its end; resume its runs from their checkpoints if they are killed."""
    from optuna.trial import TrialState  # type: ignore[import-not-found]

    values = trial_values(trial, plan.space)
    own = [*plan.overrides, *(typed(key, value) for key, value in values.items())]
    why: str | None = None
    for left in reversed(range(TRIES)):
        outcomes = run_seeds(plan, study, trial, own)
        if outcomes is None:
            study.tell(trial, state=TrialState.PRUNED)
            return
        broken = [each for each in outcomes if each.status != "finished" or each.score is None]
        if not broken:
            study.tell(trial, float(np.mean([each.score for each in outcomes])))
            return
        why = broken[0].error or f"a run is {broken[0].status} and has no score"
        if not left or any(each.status not in CUT_SHORT for each in broken):
            break
        say(f"trial {trial.number} was interrupted ({why}): resuming it")
    say(f"trial {trial.number} failed: {why}")
    study.tell(trial, state=TrialState.FAIL)


def run_seeds(
    plan: StudyPlan, study: optuna.Study, trial: optuna.Trial, own: Sequence[str]
) -> list[Outcome] | None:
    """Run all seeds of a trial in parallel; return None if it is pruned by their mean.

    If a run fails, only the outcomes of runs that had ended by then are returned.
    """
    place = plan.folder / "trials" / str(trial.number)
    reported = set(study.trials[trial.number].intermediate_values)
    with running(own, plan.seeds, place) as children:
        while any(child.process.poll() is None for child in children):
            if any(child.process.poll() not in (None, 0) for child in children):
                break
            time.sleep(EVERY)
            curves = [scores(child.directory) for child in children]
            report_progress(f"{min(map(len, curves))} of {plan.evaluations} evaluations")
            for rung in range(1, min(map(len, curves)) + 1):
                if rung not in reported:
                    trial.report(float(np.mean([curve[rung - 1] for curve in curves])), rung)
                    reported.add(rung)
            if trial.should_prune():
                return None
        ended = [child for child in children if child.process.poll() is not None]
        why = logged_error(place / "out.log")
        return [child.wait(why) for child in ended]


def scores(directory: Path) -> list[float]:
    """Return the evaluation scores of a run so far."""
    found, _, _ = read_metrics(directory / "metrics.jsonl", [SCORE])
    return list(found.get(SCORE, {}).values())


def say_progress(plan: StudyPlan, study: optuna.Study) -> None:
    """Print the study's progress as one line."""
    trials = study.get_trials(deepcopy=False)
    count = Counter(trial.state.name for trial in trials)
    over = [trial.number for trial in trials if trial.state.is_finished()]
    took = [seconds for number in over if (seconds := trained_seconds(plan, number))]
    elsewhere = running_elsewhere(plan, [t.number for t in trials if t.state.name == "RUNNING"])
    parts = [f"{len(over)}/{plan.trials} trials done", f"{elsewhere} running"]
    parts += [f"{count['PRUNED']} pruned", f"{count['FAIL']} failed"]
    if count["COMPLETE"]:
        parts.append(f"best {score(study.best_value)} (trial {study.best_trial.number})")
    parts += time_left(took, plan.trials - len(over), elsewhere + 1)
    say(f"study: {', '.join(parts)}")


def trained_seconds(plan: StudyPlan, number: int) -> float:
    """Return the seconds of a trial's longest run, interruptions excluded; 0 if unknown."""
    place = plan.folder / "trials" / str(number)
    found = (read_summary(place / f"seed-{seed}").get("wall_seconds") for seed in plan.seeds)
    return max(seconds or 0.0 for seconds in found)


def running_elsewhere(plan: StudyPlan, numbers: Sequence[int]) -> int:
    """Return how many of these trials other processes run; those that were killed are left."""
    count = 0
    with locked(plan.folder / ".planning", wait=True):  # so that nobody misses a trial meanwhile
        for number in numbers:
            file = lock_trial(plan, number)
            count += file is None
            if file is not None:
                os.close(file)
    return count


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Tune; errors are printed as one line."""
    parser = documented_parser(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", nargs="?")
    with safe_stdout():
        args = parser.parse_args(arguments)
    with displayed(find_screen(), total=0):
        with doing("reading the study"):
            plan = read_plan(validate_given(args.study, "tune", "study.yaml"))
        with folder_errors(plan.folder):
            tune(plan)


def tune(plan: StudyPlan) -> None:
    """Run the study's trials; the last of its processes writes the results."""
    study = open_study(plan)
    work(plan, study)
    with locked(plan.folder / ".finishing", wait=False) as ours:
        alive = [t for t in study.get_trials(deepcopy=False) if not t.state.is_finished()]
        if alive or not ours:
            say(f"{len(alive)} trials still run elsewhere; the last of these processes reports")
            return
        trials = study.get_trials(deepcopy=False)
        if not any(trial.state.name == "COMPLETE" for trial in trials):
            raise _no_best(plan, [trial.number for trial in trials if trial.state.name == "FAIL"])
        best: Any = study.best_trial  # suggest_* returns its stored values
        found = trial_values(best, plan.space)
        write_results(plan, study, [typed(key, value) for key, value in found.items()])


def _no_best(plan: StudyPlan, failed: Sequence[int]) -> StudyError:
    """Return that no trial finished, and why the last one of those that failed did."""
    reason = "no trial finished: there is no best one"
    if failed:
        log = plan.folder / "trials" / str(failed[-1]) / "out.log"
        reason += f"; trial {failed[-1]} failed: {logged_error(log) or f'see {log}'}"
    return StudyError(reason)
