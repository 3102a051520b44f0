"""Results of a study: preset of the best settings, plots, and scores on held-out seeds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from steadyrl.core.clock import doing, report_progress
from steadyrl.core.command.typed import command_of, install_command
from steadyrl.core.errors import describe
from steadyrl.core.files import write_atomic
from steadyrl.training.analysis.pictures import save_figure
from steadyrl.training.config.outside_agents import names_outside_agent
from steadyrl.training.config.overrides import flatten, set_key
from steadyrl.training.logging.terminal import score
from steadyrl.training.sweeps.identity import digest
from steadyrl.training.sweeps.job_run import say
from steadyrl.training.sweeps.subprocess_run import RunProcess, logged_error, running
from steadyrl.training.tuning.search_space import Range, job_of

if TYPE_CHECKING:
    import optuna  # type: ignore[import-not-found]

MADE_BY = "# Tuned by scripts/tune.py"
NOT_IN_PRESETS = ("seed", "run_dir", "run_name", "resume", "init_from", "device", "threads")
NOT_IN_PRESETS_BELOW = ("log.", "checkpoint.", "eval.")


class StudyPlan(NamedTuple):
    """A study as described by its file."""

    name: str
    overrides: list[str]
    space: dict[str, Range]
    trials: int
    seeds: list[int]
    check_seeds: list[int]
    folder: Path
    storage: str
    sampler: str
    pruner: str
    evaluations: int  # evaluations of a full run

    @property
    def digest(self) -> str:
        """Hash of everything that must be equal for trials to belong to one study."""
        return digest({"overrides": self.overrides, "space": self.space, "seeds": self.seeds})

    @property
    def preset(self) -> Path:
        """Path of the best preset, below a folder for --config-dir."""
        return self.folder / "experiment" / f"{self.name}.yaml"


def write_results(plan: StudyPlan, study: optuna.Study, best: Sequence[str]) -> None:
    """Write the best preset and plots, and compare the best with the default on held-out seeds."""
    write_preset(plan, best, study.best_value)
    with doing("drawing"):
        draw(plan, study)
    say(
        f"best: {' '.join(best)}\npreset: {plan.preset}\nuse: {use_of(plan)}\n"
        f"pictures: {plan.folder}"
    )
    found: dict[str, list[float | None]] = {}
    for group, own in (("best", [*plan.overrides, *best]), ("default", plan.overrides)):
        found[group] = []
        # After more trials other settings are the best: their runs are others.
        name = f"{group}-{digest({'overrides': own})[:6]}"
        size = len(plan.seeds)
        for at in range(0, len(plan.check_seeds), size):
            seeds = plan.check_seeds[at : at + size]
            with (
                doing(f"scoring the {group} settings"),
                running(own, seeds, plan.folder / "check" / name) as children,
            ):
                report_progress(f"{at} of {len(plan.check_seeds)} seeds done")
                found[group] += [_score(group, child) for child in children]
    write_atomic(plan.folder / "check.json", json.dumps(found, indent=2) + "\n")
    say("\n| seed | best | default |\n|---|---:|---:|")
    for seed, one, other in zip(plan.check_seeds, found["best"], found["default"], strict=True):
        say(f"| {seed} | {_shown(one)} | {_shown(other)} |")
    ours, default = mean_score(found["best"]), mean_score(found["default"])
    say(f"| mean | {_shown(ours)} | {_shown(default)} |")
    if ours is not None and default is not None and ours < default:
        say(
            "the default settings score higher on check_seeds: they need more trials or longer runs"
        )


def _score(group: str, child: RunProcess) -> float | None:
    """Wait for a run; return its score, or print why it has none."""
    outcome = child.wait()
    if outcome.score is None:
        why = outcome.error or logged_error(child.directory.parent / "out.log")
        why = why or f"it is {outcome.status}"
        say(f"{group}, {child.directory.name}: no score ({why})")
    return outcome.score


def mean_score(scores: Sequence[float | None]) -> float | None:
    """Return the mean of the known scores; None if there are none."""
    known = [value for value in scores if value is not None]
    return fmean(known) if known else None


def _shown(value: float | None) -> str:
    return "–" if value is None else score(value)


def write_preset(plan: StudyPlan, best: Sequence[str], value: float) -> None:
    """Write the settings that differ from the agent's and environment's defaults as a preset."""
    from omegaconf import OmegaConf

    whole = job_of([*plan.overrides, *best], plan.folder).config
    groups = [t for t in plan.overrides if t.partition("=")[0] in ("agent", "env")]
    if not any(t.startswith("agent=") for t in groups):  # of a preset, or the default
        groups.append(f"agent={whole['agent']['name']}")
    plain = dict(flatten(job_of(groups, plan.folder).config))
    values: dict[str, Any] = {}
    for key, found in flatten(whole):
        included = key not in NOT_IN_PRESETS and not key.startswith(NOT_IN_PRESETS_BELOW)
        if included and plain.get(key, ...) != found:
            set_key(values, key, found)
    chosen = "".join(f"  - override /{t.replace('=', ': ')}\n" for t in groups)
    head = f"# @package _global_\n{MADE_BY}: {plan.name}\n"
    head += f"# {score(value)} over {len(plan.seeds)} seeds, the best of {plan.trials} trials.\n"
    text = f"{head}defaults:\n{chosen}\n{OmegaConf.to_yaml(OmegaConf.create(values))}"
    write_atomic(plan.preset, text)


def use_of(plan: StudyPlan) -> str:
    """Return the command that trains with the best preset; it names an agent of another package."""
    named = [text for text in plan.overrides if names_outside_agent(text)]
    typed = ["--config-dir", str(plan.folder), f"experiment={plan.name}", *named]
    return f"{command_of()} {shlex.join(typed)}"


def draw(plan: StudyPlan, study: optuna.Study) -> None:
    """Plot the study's history, parameter importances and parallel coordinates."""
    import warnings

    try:
        import matplotlib
    except ModuleNotFoundError:
        say(f"pictures need matplotlib: {install_command('plot')}")
        return
    matplotlib.use("Agg")
    import optuna.visualization.matplotlib as pictures  # type: ignore[import-not-found]
    from optuna.importance import PedAnovaImportanceEvaluator  # type: ignore[import-not-found]

    of_importance: dict[str, Any] = {"evaluator": PedAnovaImportanceEvaluator()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ExperimentalWarning of Optuna's plots
        for name, plot, options in (
            ("history", pictures.plot_optimization_history, {}),
            ("importance", pictures.plot_param_importances, of_importance),
            ("parallel", pictures.plot_parallel_coordinate, {}),
        ):
            try:
                axes: Any = plot(study, **options)
                axes.figure.set_size_inches(9, 5)
                save_figure(axes.figure, plan.folder / f"{name}.png", bbox_inches="tight", dpi=110)
            except (ValueError, RuntimeError) as error:  # too few trials
                say(f"{name}.png cannot be drawn: {describe(error)}")
