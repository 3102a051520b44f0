"""A run resumed from any of its checkpoints ends like the uninterrupted run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from algorithms import NAMES, eager, known, small
from opened import job

from steadyrl.loop import train
from steadyrl.training.checkpoints.manifest import saved_below

RUN = ("env=cartpole", "env.backend=sync", "env.num_envs=2", "threads=1", "device=cpu",
       "eval.every=0", "log.every=40", "total_steps=160", "checkpoint.keep=1000",
       "checkpoint.seconds=0", "resume=auto")  # fmt: skip
EVERY = 16  # steps between checkpoints
# A large learning rate and little exploration, so that updates often change actions.
LARGE_STEPS = ("agent.learning_rate=0.3", "agent.epsilon_fraction=0.01")


def final_hash(folder: Path, *chosen: str) -> str:
    train(job(folder, *RUN, *chosen, quick=False))
    found: str = json.loads((folder / "run" / "summary.json").read_text())["weights_sha256"]
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumed_from_any_checkpoint_ends_the_same(
    tmp_path: Path, name: str, none_left_out: None
) -> None:
    agent = small(name)
    chosen = (*eager(name), *agent.quick, *agent.stateful, *known(name, *LARGE_STEPS))
    expected = final_hash(tmp_path / "never", *chosen, "checkpoint.every=0")
    with_checkpoints = final_hash(tmp_path / "whole", *chosen, f"checkpoint.every={EVERY}")
    assert with_checkpoints == expected
    saved = saved_below(tmp_path / "whole" / "run" / "checkpoints")
    assert len(saved) > 160 // EVERY  # no checkpoint was skipped
    for last in saved:
        folder = tmp_path / f"from-{last.path.name}"
        shutil.copytree(tmp_path / "whole", folder)
        for later in saved_below(folder / "run" / "checkpoints"):
            if later.path.name > last.path.name:
                shutil.rmtree(later.path)
        assert final_hash(folder, *chosen, "checkpoint.every=0") == expected, (
            f"from step {last.step}"
        )
