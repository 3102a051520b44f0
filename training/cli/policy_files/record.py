"""Record episodes of a policy to a file that needs only NumPy to be read.

python scripts/record.py RUN --episodes 100 --out episodes.npz
python scripts/record.py RUN --best --sample --out episodes.npz
python scripts/record.py RUN --env kwargs.g=5 --out episodes.npz

The file has for each episode, as the environment gives and gets them:
  episode_00000/observations    [T + 1, …], the last one is the final observation; of a Dict or
                                Tuple space observations/KEY for each part; images stay as they are
  episode_00000/actions         [T, …]
  episode_00000/rewards, terminated, truncated   [T]
  episode_00000/action_masks    [T + 1, A], of environments with action masks
and `about`, a JSON text (docs/commands.md). Films: evaluate with --video.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadyrl.core.clock import doing, report_progress
from steadyrl.core.errors import SettingError, describe, one_line
from steadyrl.training.cli.policy_files.playing import (
    HABITS,
    build_actor,
    exit_on_any_error,
    load,
    settings_of_policy,
)
from steadyrl.training.cli.programs import documented_parser
from steadyrl.training.logging.screen import displayed_on_stderr
from steadyrl.training.logging.terminal import safe_stdout
from steadyrl.training.policies.find import Policy

if TYPE_CHECKING:
    from steadyrl.envs.types import EnvSpec
    from steadyrl.training.config.settings import Settings
    from steadyrl.training.evaluation.recording import Arrays

SUFFIX = ".npz"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = documented_parser(__doc__, habits=HABITS)
    parser.add_argument("policy", type=Path, metavar="RUN|POLICY")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--episodes", type=int, help="default: those of the run's evaluations")
    parser.add_argument("--best", action="store_true", help="record policy-best/ of the run")
    parser.add_argument("--seed", type=int, help="default: the run's")
    parser.add_argument("--sample", action="store_true", help="sample actions as in training")
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args(arguments)
    for name, least in (("episodes", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise SettingError(f"--{name}", value, f"must be {least} or more")
    _validate_out(args.out)
    return args


def _validate_out(out: Path | None) -> None:
    if out is None:
        raise SettingError("--out", "", f"is missing: write --out episodes{SUFFIX}")
    if out.suffix != SUFFIX:
        raise SettingError("--out", out, f"must end in {SUFFIX}")
    if out.exists():
        raise SettingError("--out", out, "exists already; choose another name")
    folder = out.absolute().parent
    if not folder.is_dir():
        raise SettingError("--out", out, f"there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingError("--out", out, f"{folder} cannot be written to")


def record(args: argparse.Namespace, settings: Settings) -> str:
    """Play the episodes and write them; return a line about the file."""
    # Imported here: a wrong name should fail at once.
    with doing("loading torch"):
        from steadyrl.core.jit import compilation_as_phase
        from steadyrl.envs.arithmetic import flush_subnormals
        from steadyrl.training.config.seeds import choosing_seed, derive_seeds
        from steadyrl.training.evaluation.recording import EpisodeFile, RecordedEnvs, play_episodes

    policy, out = load(args), args.out.absolute()  # environments may change the directory
    run = settings.run
    episodes = args.episodes or run.eval.episodes
    run = replace(run, device="cpu", seed=choosing_seed(run) if args.seed is None else args.seed)
    num_envs = min(episodes, run.eval.num_envs)
    seed, env = derive_seeds(run.seed).evaluation, run.env.for_evaluation()
    flush_subnormals(True)  # as in training; processes started from here inherit it
    with doing("building the environments"):
        envs = RecordedEnvs(env, seed=seed, num_envs=num_envs)
    with compilation_as_phase(), closing(envs):
        spec = envs.env.spec
        actor = build_actor(policy, settings, run, spec, sample=args.sample)
        about = _about(policy, settings, spec, seed=run.seed, sample=args.sample)
        split = [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]
        try:
            with doing(f"recording {episodes} episodes"), EpisodeFile(out, about) as file:

                def write(episode: Arrays) -> None:
                    file.write(episode)
                    report_progress(f"{file.count:,} done")

                limit = run.eval.max_episode_steps
                play_episodes(envs, actor, split, max_episode_steps=limit, write=write)
        except OSError as error:
            raise SettingError("--out", args.out, f"cannot be written: {describe(error)}") from None
    return f"{args.out}: {file.count} episodes, {file.steps:,} steps"


def _about(
    policy: Policy, settings: Settings, spec: EnvSpec, *, seed: int, sample: bool
) -> dict[str, Any]:
    """Return what the file says of its episodes."""
    return {
        "env": settings.run.env.id,
        "agent": settings.agent.name,
        "policy": str(policy.path),
        "step": policy.metadata.get("step"),
        "seed": seed,
        "sampled": sample,
        "frame_stack": spec.frame_stack,
        "action": type(spec.action).__name__.removesuffix("Actions"),
    }


@exit_on_any_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Record as the command line says; errors are printed as one line."""
    with safe_stdout():
        args = parse(arguments)
    settings = settings_of_policy("record", arguments, args)
    with displayed_on_stderr():
        line = record(args, settings)
    with safe_stdout():
        print(one_line(line))
