"""The end of a run: due updates run, then the final weights are evaluated once."""

import json

import pytest
from opened import job
from warm import run

from steadyrl.core.errors import NonFiniteError
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.loop import train
from steadyrl.training.checkpoints.archive import read_part
from steadyrl.training.checkpoints.manifest import saved_below
from steadyrl.training.checkpoints.summary import weights_hash
from steadyrl.training.evaluation.evaluator import Evaluator
from steadyrl.training.setup import open_run


@pytest.fixture
def evaluations(monkeypatch):
    """Return a list of (updates, weights hash) at each evaluation."""
    seen = []
    evaluate = Evaluator.run

    def recording(self, agent, stopped):
        seen.append((agent.updates, weights_hash(agent.weights())))
        return evaluate(self, agent, stopped)

    monkeypatch.setattr(Evaluator, "run", recording)
    return seen


def evaluated_steps(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "eval/return_mean" in line]


# total_steps, eval.every, agent.train_every → evaluated steps, updates by then.
ENDS = [
    (600, 600, 600, [600], [30]),
    (600, 300, 300, [300, 600], [30, 60]),
    (600, 400, 300, [400, 600], [30, 60]),
    (500, 10_000, 250, [500], [60]),
]


@pytest.mark.parametrize(("total", "every", "burst", "steps", "updates"), ENDS)
def test_due_updates_run_before_evaluation(
    tmp_path, evaluations, total, every, burst, steps, updates
):
    result = train(
        job(
            tmp_path,
            f"total_steps={total}",
            f"eval.every={every}",
            f"agent.train_every={burst}",
            "agent.updates_per_train=30",
        )
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert evaluated_steps(tmp_path / "run") == steps
    assert [count for count, _ in evaluations] == updates
    assert evaluations[-1] == (summary["updates"], summary["weights_sha256"])
    assert result.score == pytest.approx(summary["eval_return_mean"])
    assert (result.exit_code, result.summary.steps) == (0, summary["steps"])


def test_evaluation_and_logging_do_not_change_the_weights(tmp_path):
    """Weights do not depend on evaluations and logging between updates."""
    burst = ("total_steps=1200", "agent.train_every=50", "agent.updates_per_train=4")
    hashes = set()
    for i, logging_ in enumerate(
        [("eval.every=0", "log.every=0"), ("eval.every=50", "eval.episodes=1", "log.every=1")]
    ):
        train(job(tmp_path / str(i), *burst, *logging_))
        summary = json.loads((tmp_path / str(i) / "run" / "summary.json").read_text())
        hashes.add(summary["weights_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize("rollout_steps", ["agent.rollout_steps=128", "agent.rollout_steps=100"])
def test_ppo_evaluates_its_final_weights(tmp_path, evaluations, rollout_steps):
    chosen = ("agent=ppo", "device=cpu", "total_steps=512", "eval.every=300", "eval.episodes=2")
    train(job(tmp_path, *chosen, rollout_steps, quick=False))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert evaluated_steps(tmp_path / "run") == [300, 512]
    assert evaluations[-1] == (summary["updates"], summary["weights_sha256"])


def test_the_last_checkpoint_has_the_last_evaluation(tmp_path):
    """Else a run that is trained longer takes a worse policy for the best, and overwrites it."""
    chosen = ("agent=ppo", "device=cpu", "total_steps=512", "eval.every=5000", "eval.episodes=2")
    saved = ("agent.rollout_steps=128", "checkpoint.every=256")
    train(job(tmp_path, *chosen, *saved, quick=False))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    last = saved_below(tmp_path / "run" / "checkpoints")[0]
    of_run = read_part(last.path, "run")
    assert (last.step, summary["steps"]) == (512, 512)
    assert of_run["summary"]["best_eval_return_mean"] == summary["best_eval_return_mean"]


def test_eval_every_0_disables_the_final_evaluation(tmp_path):
    directory, summary, _ = run(tmp_path, "total_steps=300", "eval.every=0")
    assert evaluated_steps(directory) == [] and summary["eval_return_mean"] is None


@pytest.mark.parametrize("kind", [EnvironmentFailedError, NonFiniteError])
def test_an_error_that_another_rank_prints_stays_silent(tmp_path, kind):
    """What is added at the end of a run does not make it another error."""
    raised = kind("environment 0 failed")
    raised.silent = True
    with pytest.raises(kind) as caught, open_run(job(tmp_path)):
        raise raised from ValueError("broken")
    assert caught.value.silent
    assert str(caught.value).startswith("environment 0 failed; the ")
