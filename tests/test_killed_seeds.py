"""Ten seeds in one process, killed four times, end like an uninterrupted batch."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from algorithms import NAMES, known
from killing import POLL
from warm import run, start

from tests.test_killed import QUICK, SAME, SAME_EVALUATION, agent_of
from tests.test_resume import metrics

SEEDS = range(10)
MANY = (f"seeds={list(SEEDS)}".replace(" ", ""), "total_steps=3000", "eval.every=1000",
        "checkpoint.every=100", "log.every=200")  # fmt: skip


def kill(folder: Path, arguments: tuple[str, ...], seed: int, generator: random.Random) -> None:
    """Kill a batch during the run of one of its seeds."""
    process = start(folder, *QUICK, *arguments, quick=False)
    checkpoints = folder / "run" / f"seed-{seed}" / "checkpoints"
    checkpoint = generator.randrange(1, 15)
    while not any(
        int(path.name.split("-")[1]) >= 100 * checkpoint for path in saved_checkpoints(checkpoints)
    ):
        assert not process.is_over(POLL), process.communicate()
    process.is_over(generator.uniform(0.0, 0.05))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def saved_checkpoints(checkpoints: Path) -> list[Path]:
    return list(checkpoints.glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ten_seeds_killed_four_times_resume_to_the_same_results(tmp_path: Path, name: str) -> None:
    arguments = (*MANY, *agent_of(name), *known(name, "agent.compile=true"))
    generator = random.Random(4)
    one, other = tmp_path / "whole", tmp_path / "killed"
    for folder in (one, other):
        folder.mkdir()
    run(one, *QUICK, *arguments, quick=False)
    for seed in (0, 3, 3, 8):
        kill(other, arguments, seed, generator)
    run(other, *QUICK, *arguments, quick=False)
    resumed = 0
    for seed in SEEDS:
        directories = [folder / "run" / f"seed-{seed}" for folder in (one, other)]
        left, right = (
            json.loads((directory / "summary.json").read_text()) for directory in directories
        )
        for key in (*SAME, *SAME_EVALUATION):
            assert left[key] == right[key], (seed, key)
        assert metrics(directories[0]) == metrics(directories[1])
        resumed += right["resumed_from_step"] is not None
    assert resumed == 3
    hashes = {json.loads((one / "run" / f"seed-{seed}" / "summary.json").read_text())
              ["weights_sha256"] for seed in SEEDS}  # fmt: skip
    assert len(hashes) == len(SEEDS)
