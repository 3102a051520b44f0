"""The checkpoint of the best evaluation holds the weights that were scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from algorithms import NAMES, small
from opened import job
from unhurried import unhurried_saves

from steadyrl.loop import train
from steadyrl.training.checkpoints.manifest import manifest_metadata
from steadyrl.training.policies.policy import read_policy, read_weights
from tests.training.checkpoints.test_unsaved import scored

RUN = ("env=cartpole", "env.num_envs=2", "device=cpu", "agent.compile=false")
SAVING = (
    "total_steps=600",
    "log.every=1000",
    "eval.every=200",
    "checkpoint.every=1000",
    "checkpoint.keep=all",
)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_best_checkpoint_is_saved_before_the_next_update(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, 9.0, 1.0, 2.0)
    with unhurried_saves():
        train(job(tmp_path, f"agent={name}", *RUN, *SAVING, *small(name).short, quick=False))
    run = tmp_path / "run"
    scores = {
        path: manifest_metadata(path)["eval_return_mean"]
        for path in (run / "checkpoints").iterdir()
    }
    (saved,) = (path for path, score in scores.items() if score == 9.0)
    assert saved.name == "step-000000000202"
    best, there = (read_weights(read_policy(path)) for path in (run / "policy-best", saved))
    torch.testing.assert_close(best, there, rtol=0, atol=0)
