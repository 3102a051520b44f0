"""Killed and resumed runs end with the weights and metrics of an uninterrupted run.

Each kill loses at most the steps since the last checkpoint.
"""

from __future__ import annotations

import random
from itertools import cycle
from pathlib import Path

import pytest
from algorithms import NAMES, eager, known, small
from killing import Fate, Victim, drawn

QUICK = (
    "device=cpu", "threads=1", "eval.episodes=2", "env.num_envs=2",
    "memory.monitor.tensors_every_seconds=1000", "run_dir=run", "resume=auto",
)  # fmt: skip


def agent_of(name: str) -> tuple[str, ...]:
    """Return a small agent with all the state that its algorithm can have."""
    return (*eager(name), *small(name).short, *small(name).stateful)


DQN, PPO = agent_of("dqn"), agent_of("ppo")
RAINBOW = (
    "agent.noisy.enabled=true", "agent.noisy.epsilon_greedy=true",
    "agent.distribution.kind=c51", "agent.dueling=true", "agent.munchausen.enabled=true",
)  # fmt: skip
MEMORY = (
    "agent.recurrent.cell=lstm",
    "agent.recurrent.size=8",
    "agent.recurrent.sequence_length=7",
)
IMAGES = ("env=minatar_breakout", "agent.normalize_obs=false")
SHORT = ("total_steps=1200", "eval.every=500", "checkpoint.every=100", "log.every=200")
LONG = ("total_steps=20000", "eval.every=6000", "checkpoint.every=150", "log.every=500")

SAME = ("weights_sha256", "steps", "updates", "episodes", "return_mean", "status")
SAME_EVALUATION = ("eval_return_mean", "best_eval_return_mean")


def killed_often(victim: Victim, kills: int, inside: float, seed: int) -> list[Fate]:
    """Kill a run `kills` times after a checkpoint, sometimes also while starting."""
    generator, fates = random.Random(seed), []
    while sum(fate.continued is not None for fate in fates) < kills:
        fate = victim.kill(drawn(generator, inside, starting=0.1 if fates else 0.0))
        assert fate.killed, "the run finished before enough kills"
        fates.append(fate)
    return fates


def compare_killed_with_uninterrupted(
    tmp_path: Path, arguments: tuple[str, ...], kills: int, inside: float = 0.5
) -> list[Fate]:
    uninterrupted = Victim(tmp_path / "whole", (*QUICK, *arguments))
    killed = Victim(tmp_path / "killed", (*QUICK, *arguments))
    one = uninterrupted.finish()
    fates = killed_often(killed, kills, inside, seed=kills)
    other = killed.finish()
    assert other["resumed_from_step"]
    for key in (*SAME, *SAME_EVALUATION):
        assert other[key] == one[key], key
    assert killed.metrics() == uninterrupted.metrics()
    return fates


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        *(
            pytest.param((*agent_of(name), f"env.backend={backend}"), id=f"{name} {backend}")
            for name, backend in zip(NAMES, cycle(("auto", "async")), strict=False)
        ),
        pytest.param(
            (*PPO, *MEMORY, "agent.popart=true"),
            id="ppo recurrent",
            marks=pytest.mark.slow,
        ),
        pytest.param((*DQN, *RAINBOW), id="rainbow", marks=pytest.mark.slow),
        *(
            pytest.param(
                (*agent, f"agent.optimizer.name={name}", "agent.optimizer.weight_decay=0.1"),
                id=f"{agent[0]} {name}",
                marks=pytest.mark.slow,
            )
            for agent in ((*DQN, "agent.hidden=[16,16]"), (*PPO, "agent.hidden=[16,16]"))
            for name in ("adamw", "radam", "muon")
        ),
        pytest.param(
            (*DQN, *RAINBOW, "agent.compile=true"), id="rainbow compiled", marks=pytest.mark.slow
        ),
    ],
)
def test_a_killed_run_resumes_to_the_same_result(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    fates = compare_killed_with_uninterrupted(tmp_path, (*SHORT, *arguments), kills=1, inside=1.0)
    assert sum(fate.inside for fate in fates) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "env", [("env=cartpole",), ("env=lunarlander",), IMAGES], ids=["cartpole", "box2d", "images"]
)
def test_twenty_kills_do_not_change_the_result(
    tmp_path: Path, env: tuple[str, ...], name: str, backend: str
) -> None:
    env = (env[0], *known(name, *env[1:]))
    arguments = (*LONG, *agent_of(name), *env, f"env.backend={backend}")
    fates = compare_killed_with_uninterrupted(tmp_path, arguments, kills=20)
    inside = sum(fate.inside for fate in fates)
    print(f"{len(fates)} kills, {inside} of them inside a save")
    assert len(fates) >= 20
    assert inside >= 6


EVERY = 500
ENDLESS = (
    "total_steps=1e9", "eval.every=700", "eval.episodes=1", f"checkpoint.every={EVERY}",
    "log.every=20",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [DQN, (*PPO, "env.backend=async")], ids=["dqn", "ppo in processes"]
)
def test_a_hundred_and_fifty_kills_lose_no_checkpoint(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    victim = Victim(tmp_path / "killed", (*QUICK, *ENDLESS, *arguments))
    generator = random.Random(1)
    fates, losses, unbounded = [victim.kill(drawn(generator, 1.0, starting=0.0))], [], 0
    reached, skipped = fates[0].logged, fates[0].skipped
    while len(fates) < 150:
        fate = victim.kill(drawn(generator, inside=0.6, starting=0.1))
        if fate.continued is not None:
            assert fate.continued >= fates[-1].newest, "an existing checkpoint is lost"
            if skipped:
                unbounded += 1
            else:
                losses.append(reached - fate.continued)
            reached, skipped = 0, False
        reached, skipped = max(reached, fate.logged), skipped or fate.skipped
        fates.append(fate)
    inside = sum(fate.inside for fate in fates)
    starting = sum(fate.continued is None for fate in fates)
    print(
        f"{len(fates)} kills, {inside} inside a save, {starting} in starting; steps lost: "
        f"{max(losses)} at most, {sum(losses) / len(losses):.0f} on average; {unbounded} had said "
        "that saves are skipped"
    )
    assert inside >= 50
    # One interval, and the steps while the next checkpoint is being written. A run that is slower
    # to write than an interval promises nothing, and says so.
    assert max(losses) <= 2 * EVERY
