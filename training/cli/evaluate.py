"""Evaluate a trained policy, record a video of it, or watch it.

    python scripts/evaluate.py outputs/CartPole-v1/dqn/2026-…       the run's policy/
    python scripts/evaluate.py RUN --best --episodes 100            its policy-best/
    python scripts/evaluate.py RUN/checkpoints/step-…               the policy of a checkpoint
    python scripts/evaluate.py RUN --video cartpole.mp4             record a video (needs: video)
    python scripts/evaluate.py RUN --watch --episodes 3             in the environment's window
    python scripts/evaluate.py RUN --env kwargs.g=5 --env id=…      in another environment

Episodes of policy/ are those of the run's own evaluations, so its score equals eval_return_mean.
policy-best/ was chosen on those, which makes its score there too high: it plays fresh ones. With
--video or --watch, episodes are played in sequence in one environment.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from steadyrl.core.clock import doing
from steadyrl.core.command.typed import as_typed
from steadyrl.core.errors import SettingError, printable
from steadyrl.core.files import rounded
from steadyrl.envs.rendering.video import validate_video_path
from steadyrl.training.cli.policy_files.playing import (
    HABITS,
    build_actor,
    exit_on_any_error,
    load,
    settings_of_policy,
)
from steadyrl.training.cli.programs import ProgramParser
from steadyrl.training.logging.screen import displayed_on_stderr
from steadyrl.training.logging.terminal import safe_stdout, stdout_to_stderr
from steadyrl.training.policies.find import Policy, PolicyError

if TYPE_CHECKING:
    from steadyrl.agents.base import Actor
    from steadyrl.envs.types import EnvSpec
    from steadyrl.training.config.settings import RunSettings, Settings
    from steadyrl.training.evaluation.evaluator import Evaluation


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = ProgramParser(
        habits=HABITS,
        description=as_typed(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("policy", type=Path, metavar="RUN|POLICY")
    parser.add_argument("--best", action="store_true", help="evaluate policy-best/ of the run")
    parser.add_argument(
        "--episodes", type=int, help="default: the run's; 1 with --video or --watch"
    )
    parser.add_argument("--seed", type=int, help="default: the run's; a fresh one for policy-best/")
    parser.add_argument("--sample", action="store_true", help="sample actions as in training")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--video", type=Path, metavar="PATH", help="record to an .mp4 or .gif file")
    shown.add_argument("--watch", action="store_true", help="open the environment's window")
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:1; default: the run's")
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args(arguments)
    if args.episodes is not None and args.episodes < 1:
        raise SettingError("--episodes", args.episodes, "must be 1 or more")
    if args.seed is not None and args.seed < 0:
        raise SettingError("--seed", args.seed, "must be 0 or more")
    if args.video:
        validate_video_path("--video", args.video)
    if args.watch:
        _validate_display()
    return args


def _validate_display() -> None:
    places = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    if sys.platform == "linux" and not any(os.environ.get(name) for name in places):
        raise PolicyError("--watch: no display to open a window on; record a video: --video PATH")


class Scored(NamedTuple):
    """A policy, the settings it was evaluated with, and its evaluation."""

    policy: Policy
    run: RunSettings
    evaluation: Evaluation


def run_settings(args: argparse.Namespace, training: RunSettings, policy: Policy) -> RunSettings:
    """Return the run's settings with the episodes, seed and device to evaluate with."""
    from steadyrl.training.evaluation.fresh_episodes import scoring_seed

    alone = args.video or args.watch
    episodes = args.episodes or (1 if alone else training.eval.episodes)
    num_envs = 1 if alone else training.eval.num_envs
    evaluation = replace(training.eval, episodes=episodes, num_envs=num_envs)
    run = replace(training, device=args.device or training.device, eval=evaluation)
    if args.seed is not None:
        return replace(run, seed=args.seed)
    return replace(run, seed=scoring_seed(training, run, best=policy.best))


def evaluate(args: argparse.Namespace, settings: Settings) -> Scored:
    """Build environments and policy only, and play."""
    # Imported here: a wrong name should fail at once.
    with doing("loading torch"):
        from steadyrl.core.jit import compilation_as_phase
        from steadyrl.envs.arithmetic import flush_subnormals

    policy = load(args)
    run = run_settings(args, settings.run, policy)
    flush_subnormals(True)  # as in training; processes started from here inherit it
    with compilation_as_phase(), _build_player(args, run) as (spec, play):
        actor = build_actor(policy, settings, run, spec, sample=args.sample)
        result: Evaluation = play(actor)
    return Scored(policy, run, result)


@contextmanager
def _build_player(args: argparse.Namespace, run: RunSettings) -> Iterator[tuple[EnvSpec, Any]]:
    """Yield the environment's spec and a function that evaluates an actor on it."""
    from steadyrl.envs.factory import build_render_env
    from steadyrl.training.config.seeds import derive_seeds
    from steadyrl.training.evaluation.evaluator import Evaluator, play

    limit, seed = run.eval.max_episode_steps, derive_seeds(run.seed).evaluation
    if not (args.video or args.watch):
        with doing("building the environments"):
            evaluator = Evaluator(run, seed=seed)
        with closing(evaluator):
            yield evaluator.env.spec, lambda actor: evaluator.play(actor, lambda: False)
        return
    episodes, video = run.eval.episodes, os.path.abspath(args.video) if args.video else None
    shown = run.env.for_rendering(video=video, episodes=episodes, max_episode_steps=limit)
    with build_render_env(shown, seed=seed) as env:

        def film(actor: Actor) -> Evaluation | None:
            with doing("recording a video" if video else "playing"):
                return play(env, actor, [episodes], max_episode_steps=limit, stopped=lambda: False)

        yield env.spec, film


def report(args: argparse.Namespace, settings: Settings, scored: Scored) -> str:
    """Return the evaluation as text, or as JSON."""
    import numpy as np

    from steadyrl.training.config.seeds import choosing_seed

    policy, run, found = scored
    values: dict[str, Any] = {
        "policy": str(policy.path),
        "step": policy.metadata.get("step"),
        "agent": settings.agent.name,
        "env": run.env.id,
        "seed": run.seed,
        "chosen_on_seed": choosing_seed(settings.run) if policy.best else None,
        "sample": args.sample,
        "episodes": found.episodes,
        "return_mean": rounded(found.mean),
        "return_std": rounded(found.std),
        "return_ci95": found.interval and [rounded(end) for end in found.interval],
        "length_mean": rounded(float(np.mean(found.lengths))),
        "length_std": rounded(float(np.std(found.lengths))),
        "left_out": found.left_out,
        "returns": [rounded(each) for each in found.returns],
        "lengths": list(found.lengths),
        "video": str(args.video) if args.video else None,
    }
    if args.json:
        return json.dumps(values)
    v = values
    low, high = v["return_ci95"] or (math.nan, math.nan)
    sure = "" if v["return_ci95"] is None else f", 95 % CI of the mean {low} to {high}"
    at = f"{v['step']:,}" if isinstance(v["step"], int) else v["step"]
    lines = [
        f"policy:   {v['policy']}, {v['agent'].upper()} on {v['env']}, step {at}",
        f"episodes: {v['episodes']}, {_seed(v)}, {'sampled' if v['sample'] else 'greedy'}",
        f"return:   {v['return_mean']}, std {v['return_std']}{sure}",
        f"length:   {v['length_mean']}, std {v['length_std']}",
    ]
    if args.video:
        lines.append(f"video:    {args.video}")
    return "\n".join(lines)


def _seed(values: Mapping[str, Any]) -> str:
    """Return the seed of the episodes, and whether the policy was chosen on them."""
    seed, chosen = values["seed"], values["chosen_on_seed"]
    if chosen is None:
        return f"seed {seed}"
    if chosen == seed:
        return f"seed {seed} (chosen on these: too high a score)"
    return f"seed {seed} (fresh: chosen on those of seed {chosen})"


@exit_on_any_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate as the command line says; errors are printed as one line."""
    with safe_stdout():
        args = parse(arguments)
    settings = settings_of_policy("evaluate", arguments, args)
    # Warnings go to stderr as single lines, without tracebacks.
    with stdout_to_stderr(), displayed_on_stderr():
        scored = evaluate(args, settings)
    if scored.evaluation.remark:
        print(f"note: {scored.evaluation.remark}", file=sys.stderr)
    with safe_stdout():
        print(printable(report(args, settings, scored)))
