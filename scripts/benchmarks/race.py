"""Time from process start to an evaluated policy, against other libraries.

Ours trains a preset by the command line; the settings of Stable-Baselines3 and rejax are derived
from the same preset.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from scripts.benchmarks.peers import REJAX, SB3, installed
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.training.config.settings import Settings
from steadyrl.training.run.job import accept, compose_one

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ("cartpole_ppo", "cartpole_dqn", "pendulum_ppo", "acrobot_dqn")
OURS = "SteadyRL"
# Settings that are translated for Stable-Baselines3; other algorithms race alone.
FOR_SB3 = (DQNSettings, PPOSettings)
# Gymnasium environments that gymnax has.
REJAX_ENVS = ("CartPole", "Acrobot", "MountainCar", "MountainCarContinuous", "Pendulum")


class Finish(NamedTuple):
    """Result of a contestant."""

    seconds: float
    score: float


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `race` to the benchmark command."""
    parser = subparsers.add_parser("race", help="time from process start to the evaluated policy")
    parser.add_argument("presets", nargs="*", default=PRESETS, help="presets of configs/experiment")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[OURS, SB3, REJAX], help="contestants")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides for all contestants")
    parser.add_argument("--plot", type=Path, help="write a bar chart of the seconds to this file")
    parser.set_defaults(run=race)


def race(args: argparse.Namespace) -> None:
    """Print a Markdown table of seconds and scores per preset."""
    found: dict[str, dict[str, list[Finish]]] = {}
    print("| preset | contestant | seconds (median) | against ours | scores |")
    print("|---|---|---:|---:|---|")
    for preset in args.presets:
        arguments = [f"experiment={preset}", *args.set]
        field = contestants(arguments, accept(compose_one(arguments), arguments).settings)
        taking_part = {name: field[name] for name in field if name in args.only}
        # A discarded first run fills the cache of compiled code.
        if OURS in taking_part:
            taking_part[OURS](0)
        finishes: dict[str, list[Finish]] = {name: [] for name in taking_part}
        for seed in range(args.seeds):
            for name, run in taking_part.items():
                finishes[name].append(run(seed))
        found[preset] = finishes
        for name, each in finishes.items():
            print(line(preset, name, each, finishes.get(OURS)), flush=True)
    if args.plot is not None:
        plot(found, args.plot)


def line(preset: str, name: str, finishes: list[Finish], ours: list[Finish] | None) -> str:
    """Return a row of the table."""
    seconds = median(finish.seconds for finish in finishes)
    against = "-"
    if ours is not None:
        pairs = zip(finishes, ours, strict=True)
        against = f"{median(one.seconds / two.seconds for one, two in pairs):.2f}x"
    scores = ", ".join(f"{finish.score:.0f}" for finish in finishes)
    return f"| {preset} | {name} | {seconds:.1f} | {against} | {scores} |"


def contestants(
    typed: Sequence[str], settings: Settings, *, nothing_more: bool = False
) -> dict[str, Callable[[int], Finish]]:
    """Return the contestants that support these settings; `nothing_more`: peers use defaults."""
    steps = settings.run.total_steps
    arguments = (*typed, f"eval.every={steps}", "threads=1", "device=cpu")
    runners: dict[str, Callable[[int], Finish]] = {OURS: lambda seed: ours(arguments, seed)}
    if isinstance(settings.agent, FOR_SB3) and installed("stable_baselines3", SB3):
        theirs = for_sb3(settings)
        if nothing_more:
            theirs |= {"normalize": None, "policy": {}, "model": {}, "encoder": "mlp"}
        runners[SB3] = lambda seed: peer("sb3", {**theirs, "seed": seed})
    env = settings.run.env.id.partition("-")[0]
    if isinstance(settings.agent, PPOSettings) and env in REJAX_ENVS and installed("rejax", REJAX):
        same = for_rejax(settings, settings.agent)
        runners[REJAX] = lambda seed: peer("rejax", {"seed": seed, "config": same})
    return runners


def ours(arguments: Sequence[str], seed: int) -> Finish:
    """Train by the command line, with one evaluation at the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), *arguments, f"seed={seed}"]
        seconds, _ = timed([*command, f"run_dir={folder}/run"])
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    return Finish(seconds, summary["eval_return_mean"])


def peer(name: str, arguments: Mapping[str, Any]) -> Finish:
    """Train a peer in a process that imports nothing of ours."""
    program = str(ROOT / "scripts" / "benchmarks" / "peers.py")
    seconds, printed = timed([sys.executable, program, name, json.dumps(arguments)])
    return Finish(seconds, json.loads(printed.splitlines()[-1]))


def timed(command: list[str]) -> tuple[float, str]:
    """Return a process's seconds from start to end, and its stdout."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return seconds, done.stdout


def for_sb3(settings: Settings) -> dict[str, Any]:
    """Return our settings as arguments of Stable-Baselines3; [start] means annealed to 0."""
    agent, run = settings.agent, settings.run
    assert isinstance(agent, FOR_SB3)
    normalize = None
    policy: dict[str, Any] = {
        "net_arch": list(agent.hidden),
        "activation": agent.network.activation,
    }
    if isinstance(agent, PPOSettings):
        policy |= {
            "log_std_init": agent.log_std_init,
            "ortho_init": agent.network.init != "uniform",
        }
        model = _ppo_for_sb3(agent, run.env.num_envs)
        own = {"norm_obs": _normalizes_obs(agent), "norm_reward": agent.normalizes_reward}
        if any(own.values()):
            normalize = {**own, "gamma": agent.gamma}
    else:
        model = _dqn_for_sb3(agent)
    model |= {
        "gamma": agent.gamma,
        "max_grad_norm": agent.max_grad_norm,
        "learning_rate": annealed(agent.learning_rate, agent.anneal_learning_rate),
    }
    return {
        "algorithm": agent.name,
        "env": run.env.id,
        "kwargs": dict(run.env.kwargs),
        "num_envs": run.env.num_envs,
        "total_timesteps": run.total_steps,
        "episodes": run.eval.episodes,
        "longest": run.eval.max_episode_steps,
        "normalize": normalize,
        "encoder": agent.network.encoder,
        "shared": isinstance(agent, PPOSettings) and agent.shared_trunk is not False,
        "policy": policy,
        "model": model,
    }


def _normalizes_obs(agent: PPOSettings) -> bool:
    return agent.normalize_obs is not False  # races use vector observations


def _ppo_for_sb3(agent: PPOSettings, num_envs: int) -> dict[str, Any]:
    return {
        "n_steps": agent.rollout_steps,
        "batch_size": agent.batch_size or agent.rollout_steps * num_envs // agent.minibatches,
        "n_epochs": agent.epochs,
        "gae_lambda": agent.gae_lambda,
        "clip_range": annealed(agent.clip, agent.anneal_clip),
        "ent_coef": agent.entropy_coef,  # presets set it
        "vf_coef": agent.value_coef,
        "target_kl": agent.target_kl,
    }


def _dqn_for_sb3(agent: DQNSettings) -> dict[str, Any]:
    return {
        "buffer_size": agent.replay.capacity,
        "learning_starts": agent.learning_starts,
        "batch_size": agent.batch_size,
        "tau": agent.target_tau,
        "train_freq": agent.train_every,
        "gradient_steps": agent.updates_per_train,
        "target_update_interval": agent.target_every,
        "exploration_fraction": agent.epsilon_fraction,
        "exploration_initial_eps": agent.epsilon_start,
        "exploration_final_eps": agent.epsilon_end,
        "n_steps": agent.n_step,
    }


def annealed(start: float, how: object) -> float | list[float]:
    """Return [start] if annealed to 0, else the constant."""
    return [start] if how == "linear" else start


def for_rejax(settings: Settings, agent: PPOSettings) -> dict[str, Any]:
    """Return our settings as arguments of rejax, which has no annealing."""
    rows = agent.rollout_steps * settings.run.env.num_envs
    return {
        "env": settings.run.env.id,
        "num_envs": settings.run.env.num_envs,
        "num_steps": agent.rollout_steps,
        "num_epochs": agent.epochs,
        "num_minibatches": rows // agent.batch_size if agent.batch_size else agent.minibatches,
        "total_timesteps": settings.run.total_steps,
        "eval_freq": settings.run.total_steps,
        "skip_initial_evaluation": True,
        "learning_rate": agent.learning_rate,
        "gamma": agent.gamma,
        "gae_lambda": agent.gae_lambda,
        "clip_eps": agent.clip,
        "ent_coef": agent.entropy_coef,  # presets set it
        "vf_coef": agent.value_coef,
        "max_grad_norm": agent.max_grad_norm,
        "normalize_observations": _normalizes_obs(agent),
        "agent_kwargs": {
            "activation": agent.network.activation,
            "hidden_layer_sizes": list(agent.hidden),
        },
    }


def plot(found: Mapping[str, Mapping[str, list[Finish]]], picture: Path) -> None:
    """Plot mean seconds of every contestant as bars, labelled with its mean score."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.0 + 1.1 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, (preset, finishes) in zip(panels, found.items(), strict=True):
        names = list(finishes)
        seconds = [mean(finish.seconds for finish in finishes[name]) for name in names]
        bars = axes.barh(names, seconds, color=["tab:blue", "tab:gray", "tab:olive"][: len(names)])
        scores = [mean(finish.score for finish in finishes[name]) for name in names]
        axes.bar_label(bars, [f" {s:.0f} s, {v:.0f}" for s, v in zip(seconds, scores, strict=True)])
        axes.margins(x=0.2)
        axes.invert_yaxis()
        axes.set_title(preset, loc="left", fontsize="medium")
    panels[-1].set_xlabel("seconds from process start to the evaluated policy, and its mean return")
    figure.savefig(picture, dpi=100)
