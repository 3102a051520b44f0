"""The checkpoint of the best evaluation holds the weights that were scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from algorithms import NAMES, keys, known, small
from opened import job
from unhurried import unhurried_saves

from steadyrl.loop import train
from steadyrl.training.checkpoints.manifest import manifest_metadata
from steadyrl.training.checkpoints.run_directory import read_summary
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


ROLLOUT = tuple(name for name in NAMES if "agent.rollout_steps" in keys(name))


def check_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *overrides: str
) -> Path:
    """Train and return the best checkpoint; it must have the weights of the first evaluation."""
    scored(monkeypatch, 9.0, 1.0, 2.0, 1.0, 2.0)  # the last two: where it is resumed
    chosen = (f"agent={name}", *RUN, *SAVING, *small(name).short, *overrides)
    with unhurried_saves():
        train(job(tmp_path, *chosen, quick=False))
    run = tmp_path / "run"
    scores = {
        path: manifest_metadata(path)["eval_return_mean"]
        for path in (run / "checkpoints").iterdir()
    }
    (saved,) = (path for path, score in scores.items() if score == 9.0)
    assert saved.name == "step-000000000202"
    best, there = (read_weights(read_policy(path)) for path in (run / "policy-best", saved))
    torch.testing.assert_close(best, there, rtol=0, atol=0)
    return saved


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_best_checkpoint_is_saved_before_the_next_update(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_best_checkpoint(tmp_path, monkeypatch, name)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["auto", "sync"])
@pytest.mark.parametrize("name", ROLLOUT)
def test_a_rollout_that_fills_right_after_the_best_evaluation_waits_for_its_checkpoint(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = known(name, "agent.rollout_steps=1", "agent.minibatches=1")  # full at every timestep
    best = check_best_checkpoint(tmp_path, monkeypatch, name, *each, f"env.backend={backend}")
    before = read_summary(tmp_path / "run")
    train(job(tmp_path, f"resume={best}", quick=False))
    after = read_summary(tmp_path / "run")
    assert after["resumed_from_step"] == 202
    assert all(after[key] == before[key] for key in ("weights_sha256", "updates", "episodes"))
