"""Whatever a run is continued from, it ends as it would have: no checkpoint changes a decision."""

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
BETWEEN = 16  # steps from one checkpoint to the next
# Steps so large that an update often changes what is done next, and few random actions.
LARGE_STEPS = ("agent.learning_rate=0.3", "agent.epsilon_fraction=0.01")


def end(folder: Path, *chosen: str) -> str:
    train(job(folder, *RUN, *chosen, quick=False))
    found: str = json.loads((folder / "run" / "summary.json").read_text())["weights_sha256"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_run_continued_from_any_checkpoint_ends_as_it_would_have(
    tmp_path: Path, name: str, none_left_out: None
) -> None:
    agent = small(name)
    chosen = (*eager(name), *agent.quick, *agent.stateful, *known(name, *LARGE_STEPS))
    expected = end(tmp_path / "never", *chosen, "checkpoint.every=0")
    whole = end(tmp_path / "whole", *chosen, f"checkpoint.every={BETWEEN}")
    assert whole == expected
    saved = saved_below(tmp_path / "whole" / "run" / "checkpoints")
    assert len(saved) > 160 // BETWEEN  # none was left out
    for last in saved:
        folder = tmp_path / f"from-{last.path.name}"
        shutil.copytree(tmp_path / "whole", folder)
        for later in saved_below(folder / "run" / "checkpoints"):
            if later.path.name > last.path.name:
                shutil.rmtree(later.path)
        assert end(folder, *chosen, "checkpoint.every=0") == expected, f"from step {last.step}"
