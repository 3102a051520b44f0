"""Runs in environments that Gymnasium registers as vector environments only."""

from pathlib import Path

import pytest
import warm
from logged_runs import uninterrupted_and_resumed
from opened import job

ENVS = ("env.id=toy_environments:OnlyBatch-v0", "agent.compile=false", "device=cpu")
AGENTS = {
    "dqn": ("agent=dqn", "agent.hidden=[16]", "agent.learning_starts=50", "agent.train_every=8"),
    "ppo": ("agent=ppo", "agent.hidden=[16]", "agent.rollout_steps=32", "agent.minibatches=2"),
}
SHORT = ("total_steps=300", "eval.every=100", "eval.episodes=2", "log.every=100")


@pytest.mark.long
@pytest.mark.parametrize("name", AGENTS)
def test_auto_trains_and_evaluates_with_backend_batch(tmp_path: Path, name: str) -> None:
    runs = [
        warm.run(tmp_path, *ENVS, *AGENTS[name], *SHORT, *more, quick=False)
        for more in (("run_dir=auto",), ("env.backend=batch", "run_dir=batch"))
    ]
    (_, summary, output), (_, explicit, _) = runs
    assert "backend batch for 1 x toy_environments:OnlyBatch-v0" in output
    assert summary["eval_return_mean"] > 0
    assert summary["weights_sha256"] == explicit["weights_sha256"]


@pytest.mark.parametrize("name", AGENTS)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    run_job = job(tmp_path, *ENVS, *AGENTS[name], *SHORT, "env.num_envs=3", quick=False)
    one, two, whole, parts = uninterrupted_and_resumed(run_job, 130)
    assert whole == parts and len(whole) >= 3 and one.summary.updates > 9
    assert one.summary.weights_sha256 == two.summary.weights_sha256
