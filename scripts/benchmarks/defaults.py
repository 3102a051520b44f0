"""Two trainers' defaults on twenty environments: what a newcomer gets who chooses nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import mean

from scripts.benchmarks.peers import SB3, installed
from scripts.benchmarks.race import OURS, Finish, ours, peer
from training.command_line import accept, compose_one
from training.settings import RunSettings

# For how many steps: what our defaults were chosen on …
CHOSEN_ON = {
    "env=cartpole": 50_000,
    "env=acrobot": 50_000,
    "env=mountaincar": 100_000,
    "env=mountaincar_continuous": 50_000,
    "env=pendulum": 100_000,
    "env=frozenlake": 50_000,
    "env=cliffwalking": 50_000,
    "env=taxi": 50_000,
    "env=lunarlander": 100_000,
    "env=minatar_breakout": 150_000,
    "env=minatar_asterix": 150_000,
    "env=hopper": 150_000,
}
# … and what they were not.
UNTOUCHED = {
    "env.id=Blackjack-v1": 50_000,
    "env=frozenlake env.kwargs.map_name=8x8": 100_000,
    "env=minatar_spaceinvaders": 150_000,
    "env=minatar_freeway": 150_000,
    "env=lunarlander_continuous": 100_000,
    "env=invertedpendulum": 50_000,
    "env=swimmer": 100_000,
    "env=halfcheetah": 150_000,
}

CONTINUOUS = {
    f"env={name}"
    for name in ("mountaincar_continuous", "pendulum", "hopper", "lunarlander_continuous",
                 "invertedpendulum", "swimmer", "halfcheetah")
}  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `defaults` to the benchmark command."""
    parser = subparsers.add_parser("defaults", help="ours beside Stable-Baselines3's")
    parser.add_argument("envs", nargs="*", help="overrides=steps; default: twenty environments")
    parser.add_argument("--agents", nargs="*", default=["dqn", "ppo"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[OURS, SB3], help="who takes part")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides for our side")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print scores and seconds of both programs' defaults, environment by environment."""
    given = {env: int(steps) for env, _, steps in (each.rpartition("=") for each in args.envs)}
    print("| agent | environment | steps | contestant | score | scores | seconds |")
    print("|---|---|---:|---|---:|---|---:|")
    for env, steps in (given or CHOSEN_ON | UNTOUCHED).items():
        for agent in args.agents:
            if agent == "dqn" and env in CONTINUOUS:
                continue
            told = (f"agent={agent}", *env.split(), f"total_steps={steps}", f"eval.every={steps}")
            job = accept(compose_one(list(told)), list(told))
            here = (*told, "threads=1", "device=cpu", *args.set)
            field: dict[str, Callable[[int], Finish]] = {OURS: partial(ours, here)}
            if installed("stable_baselines3", SB3):
                field[SB3] = partial(_their_defaults, job.settings.run, agent)
            for name in (name for name in field if name in args.only):
                found = [field[name](seed) for seed in range(args.seeds)]
                score, seconds = (mean(column) for column in zip(*found, strict=True))
                scores = ", ".join(f"{finish.score:.1f}" for finish in found)
                cells = (agent, env, f"{steps:,}", name, f"{score:.1f}", scores, f"{seconds:.0f}")
                print(f"| {' | '.join(cells)} |", flush=True)


def _their_defaults(run: RunSettings, agent: str, seed: int) -> Finish:
    told = {
        "algorithm": agent,
        "env": run.env.id,
        "kwargs": dict(run.env.kwargs),
        "num_envs": run.env.num_envs,
        "total_timesteps": run.total_steps,
        "episodes": run.eval.episodes,
        "normalize": None,
        "hidden": None,
        "model": {},
    }
    return peer("sb3", {**told, "seed": seed})
