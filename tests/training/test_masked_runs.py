"""Runs in environments that fail on forbidden actions, which are never taken."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import warm
from logged_runs import uninterrupted_and_resumed
from opened import job

from steadyrl.agents.registry import SupportsMasks
from steadyrl.core.errors import SettingError
from steadyrl.training.cli.evaluate import main
from steadyrl.training.policies.policy import plain_spec, spec_of
from steadyrl.training.run.job import probed
from tests.test_killed import QUICK as KILLED
from tests.test_killed import compare_killed_with_uninterrupted

DOORS = "env.id=masked_envs:Doors-v0"
ENVS = (DOORS, "env.num_envs=2", "env.max_restarts=0", "device=cpu", "agent.compile=false")
DQN = (
    "agent=dqn", "agent.hidden=[16]", "agent.learning_starts=50", "agent.train_every=8",
    "agent.updates_per_train=1", "agent.replay.prioritized=true", "agent.n_step=3",
)  # fmt: skip
PPO = (
    "agent=ppo", "agent.hidden=[16]", "agent.rollout_steps=32", "agent.epochs=2",
    "agent.minibatches=2", "agent.normalize_obs=true",
)  # fmt: skip
SHORT = ("total_steps=300", "eval.every=100", "eval.episodes=2", "log.every=100")
ALL = (
    "agent.double=true", "agent.dueling=true", "agent.munchausen.enabled=true",
    "agent.noisy.enabled=true",
    "agent.distribution.kind=c51", "agent.distribution.v_min=0", "agent.distribution.v_max=10",
)  # fmt: skip
AGENTS = {
    "dqn": (DQN, "info"),
    "dqn with all options": ((*DQN, *ALL, "env.frame_stack=2"), "observation"),
    "ppo": (PPO, "method"),
    "ppo recurrent": (
        (*PPO, "agent.recurrent.cell=gru", "agent.recurrent.sequence_length=5"),
        "info",
    ),
    "ppo shared trunk": ((*PPO, "agent.shared_trunk=true", "env.frame_stack=2"), "observation"),
}


SLOW = {name: pytest.mark.slow for name in ("dqn", "ppo", "ppo shared trunk")}


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in AGENTS])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, name):
    agent, source = AGENTS[name]
    overrides = (*ENVS, *agent, f"++env.kwargs={{doors: 30, source: {source}}}", *SHORT)
    run_job = job(tmp_path, *overrides, quick=False)
    assert run_job.spec.mask == 2 and run_job.config["env"]["action_masks"] == "auto"
    run, second, whole, parts = uninterrupted_and_resumed(run_job, 170)
    assert parts == whole and len(whole) >= 3 and run.summary.updates > 9
    assert second.summary.weights_sha256 == run.summary.weights_sha256


def test_policies_are_evaluated_with_their_training_masks(tmp_path, capsys):
    run, summary, _ = warm.run(tmp_path, *ENVS, *PPO, *SHORT, quick=False)
    spec = json.loads((Path(run) / "policy" / "manifest.json").read_text())["metadata"]["spec"]
    assert spec["mask"] == 5 and spec_of(spec).unmasked_shape == (10,)
    for more in (), ("--env=action_masks=false",):
        main([str(run), "--json", "--env=id=masked_envs:Doors-v0", *more])
        result = json.loads(capsys.readouterr().out)
        assert result["return_mean"] == summary["eval_return_mean"]


def test_one_hot_observations_are_saved_as_such(tmp_path):
    """A policy is built from its saved spec, and normalises by default what is not one-hot."""
    for name, one_hot in (("frozenlake", True), ("cartpole", False)):
        plain = plain_spec(job(tmp_path, "total_steps=300", f"env={name}").spec)
        assert spec_of(plain).one_hot is one_hot and ("one_hot" in plain) is one_hot


def test_specs_without_masks_are_saved_without_the_field(tmp_path):
    run_job = job(tmp_path, "total_steps=300", "env=taxi", "env.backend=sync")
    assert run_job.spec.mask == 1
    spec = job(tmp_path, "total_steps=300").spec
    assert "mask" not in plain_spec(spec) and spec_of(plain_spec(spec)).mask == 0


class Foreign:
    """Settings of an algorithm without action masks."""

    name = "foreign"


def test_agents_without_mask_support_get_no_masks(tmp_path):
    settings = job(tmp_path, DOORS).settings
    assert isinstance(settings.agent, SupportsMasks) and settings.run.env.action_masks == "true"
    for value in ("true", "auto", "false"):
        run = replace(settings.run, env=replace(settings.run.env, action_masks=value))
        foreign = replace(settings, run=run, agent=Foreign())
        if value == "true":
            with pytest.raises(SettingError, match=r"masks=true: agent foreign does not support"):
                probed(foreign)
            continue
        found, spec = probed(foreign)
        assert spec.mask == 0 and found.run.env.action_masks == "false"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("name", AGENTS)
def test_killed_runs_resume_to_the_same_result(tmp_path, name, backend):
    agent, source = AGENTS[name]
    more = (f"env.kwargs={{source: {source}}}", f"env.backend={backend}", "total_steps=4000",
            "agent.compile=false")  # fmt: skip
    checkpoints = (
        "eval.every=1000",
        "checkpoint.every=150",
        "log.every=500",
        "agent.replay.capacity=700",
    )
    checkpoints = checkpoints if "dqn" in name else checkpoints[:-1]
    fates = compare_killed_with_uninterrupted(
        tmp_path, (DOORS, *agent, *more, *checkpoints), kills=3
    )
    assert len(fates) >= 3 and "env.num_envs=2" in KILLED
