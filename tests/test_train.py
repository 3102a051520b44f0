"""The training command end to end: output files, determinism, signals and errors."""

import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from command import environment
from opened import job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from warm import run, start

from steadyrl.loop import train

TAGS = {
    "rollout/return_mean",
    "rollout/length_mean",
    "rollout/reward_mean",
    "eval/return_mean",
    "eval/return_std",
    "train/loss",
    "train/td_error",
    "train/q_mean",
    "train/epsilon",
    "train/learning_rate",
    "train/grad_norm",
    "time/steps_per_second",
    "time/updates_per_second",
    "time/environment_ms",
    "time/act_ms",
    "time/update_ms",
    "time/other_ms",
    "memory/replay_fill",
    "memory/rss_mb",
}
KEYS = [
    "status",
    "run_dir",
    "agent",
    "env",
    "seed",
    "steps",
    "updates",
    "episodes",
    "return_mean",
    "eval_return_mean",
    "eval_return_std",
    "eval_episodes",
    "best_eval_return_mean",
    "steps_per_second",
    "wall_seconds",
    "speed_trend_percent",
    "speed_trend_percent_low",
    "speed_trend_percent_high",
    "time_share_environment",
    "time_share_act",
    "time_share_update",
    "time_share_other",
    "time_share_evaluation",
    "rss_mb_peak",
    "tree_mb_peak",
    "cuda_mb_peak",
    "memory_limit",
    "cleanings",
    "cleaned_mb",
    "resumed_from_step",
    "stopped_by",
    "weights_sha256",
    "mirror_complete",
]


# Rewards whose squares overflow.
HUGE = ("env.id=broken_envs:Bad-v0", "agent.loss=squared", "env.kwargs.reward=1e38")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    # The last value counts; the first one's interpolation is not resolved.
    return run(tmp_path_factory.mktemp("reference"), "seed=${nowhere}", "seed=0")


@pytest.mark.long
@pytest.mark.machinery  # the reference calls Tensor.backward, which imports SymPy
def test_eager_runs_load_neither_sympy_inductor_nor_rich(tmp_path):
    program = (
        "import sys, train\n"
        "from steadyrl.training.cli.main import main\n"
        "for agent in ('dqn', 'ppo'):\n"
        "    sys.argv = ['train.py', f'agent={agent}', *sys.argv[-3:]]\n"
        "    main(train.train)\n"
        "sys.exit(f'loaded: {loaded}' if (loaded := {'sympy', 'torch._inductor.graph', 'rich'} "
        "& set(sys.modules)) else 0)\n"
    )
    overrides = ("total_steps=2100", "device=cpu", "agent.compile=false")
    command = [sys.executable, "-c", program, *overrides]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finished") == 2


def test_a_run_prints_its_directory_and_writes_a_summary(reference):
    directory, summary, printed = reference
    assert summary["run_dir"] in printed
    assert f"tensorboard --logdir {summary['run_dir']}" in printed
    assert "training: backend kernel for 1 x CartPole-v1" in printed
    assert "evaluation: backend kernel for 3 x CartPole-v1" in printed
    assert list(summary) == KEYS
    assert summary["status"] == "finished"
    assert summary["steps"] == 2000
    assert summary["updates"] == 2 * (2000 - 200) // 8
    assert summary["eval_episodes"] == 3
    assert len(summary["weights_sha256"]) == 64
    assert str(directory).endswith(summary["run_dir"])
    names = {path.name for path in directory.iterdir()}
    assert {"config.yaml", ".hydra", "train.log", "metrics.jsonl", "summary.json"} <= names
    assert {path.name for path in (directory / ".hydra").iterdir()} == {
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    }


def test_a_run_tells_where_its_time_went(reference):
    directory, summary, printed = reference
    fractions = [value for key, value in summary.items() if key.startswith("time_share_")]
    assert min(fractions) >= 0 and sum(fractions) == pytest.approx(1, abs=1e-4)
    assert printed.count("\ntime: ") == 1
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "time/steps_per_second" in values:
            parts = [
                values[f"time/{part}_ms"] for part in ("environment", "act", "update", "other")
            ]
            assert sum(parts) == pytest.approx(1000 / values["time/steps_per_second"])
            assert min(parts[:3]) > 0


def test_metrics_have_all_tags_and_increasing_steps(reference):
    directory, _, _ = reference
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [500, 1000, 1500, 2000]
    assert set().union(*lines) >= TAGS
    assert [line["step"] for line in lines if "eval/return_mean" in line] == [1000, 2000]
    events = EventAccumulator(str(directory)).Reload()
    evaluated = EventAccumulator(str(directory / "eval")).Reload()
    tags = {tag: events for tag in events.Tags()["scalars"]}
    tags |= {tag: evaluated for tag in evaluated.Tags()["scalars"] if tag != "episode/return"}
    assert set(tags) >= TAGS
    episodes = events.Scalars("rollout/return")  # logged at their own steps
    assert [e.step for e in episodes] == sorted(e.step for e in episodes)
    last = np.mean([e.value for e in episodes[-20:]])
    assert 1 <= last <= 500 and 0 < episodes[0].step < episodes[-1].step <= 2000
    for tag in set(tags) - {"rollout/return", "episode/return"}:
        seen = [(e.step, e.value) for e in tags[tag].Scalars(tag)]
        written = [(line["step"], line[tag]) for line in lines if tag in line]
        assert [step for step, _ in seen] == [step for step, _ in written]
        assert all(
            math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(seen, written, strict=True)
        )


def weights(folder, *overrides):
    """Train in this process; return the hash of the weights."""
    train(job(folder, *overrides))
    return json.loads((folder / "run" / "summary.json").read_text())["weights_sha256"]


@pytest.mark.parametrize("overrides", [(), ("eval.every=0", "log.every=130")])
def test_the_same_seed_gives_the_same_weights_whatever_is_logged(reference, tmp_path, overrides):
    assert weights(tmp_path, *overrides) == reference[1]["weights_sha256"]


def test_another_seed_gives_other_weights(reference, tmp_path):
    assert weights(tmp_path, "seed=1") != reference[1]["weights_sha256"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_cleanly(tmp_path, number, code):
    process = start(tmp_path, "total_steps=1e8", "env.num_envs=2")
    for line in process.stdout:
        if line.startswith("step"):
            break
    os.kill(process.pid, number)
    out, err = process.communicate()
    assert process.returncode == code, out + err
    assert "Traceback" not in out + err
    [path] = tmp_path.rglob("summary.json")
    summary = json.loads(path.read_text())
    assert summary["status"] == "interrupted"
    assert 0 < summary["steps"] < 1e8
    lines = (path.parent / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == summary["steps"]


def test_a_directory_in_use_is_rejected(tmp_path):
    first = start(tmp_path, "total_steps=1e8", "run_dir=here")
    for line in first.stdout:
        if line.startswith("step"):
            break
    second = start(tmp_path, "run_dir=here")
    _, err = second.communicate()
    assert second.returncode == 6
    assert f"run_dir={tmp_path / 'here'}" in err
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    third = start(tmp_path, "run_dir=here")
    _, err = third.communicate()
    assert third.returncode == 2
    assert "holds a run already" in err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("env.id=broken_envs:Bad-v0", "env.kwargs={reward: nan}"), ["reward", "environment"]),
        (("env.id=broken_envs:Bad-v0", "env.kwargs={observation: inf}"), ["observation"]),
        (HUGE, ["train/loss", "update"]),
    ],
)
def test_non_finite_values_stop_the_run(tmp_path, overrides, words):
    _, summary, printed = run(tmp_path, *overrides, "env.max_restarts=0", code=5)
    assert summary["status"] == "diverged"
    # Below it a line of the environment may follow, where it defines what returned the value.
    last = [line for line in printed.strip().splitlines() if not line.startswith("  ")][-1]
    assert last.startswith("error: ")
    for word in words:
        assert word in last


def test_a_sweep_continues_after_a_failed_job(tmp_path):
    process = start(tmp_path, "-m", *HUGE[:2], "env.kwargs.reward=1e38,1", "total_steps=500")
    out, err = process.communicate()
    assert process.returncode == 5, out + err
    summaries = {p.parent.name: json.loads(p.read_text()) for p in tmp_path.rglob("summary.json")}
    assert {name: summary["status"] for name, summary in summaries.items()} == {
        "env.kwargs.reward-1e38__job-0": "diverged",
        "env.kwargs.reward-1__job-1": "finished",
    }
