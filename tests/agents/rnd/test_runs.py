"""Runs with RND: resumed or killed they end the same; memory budget and invalid settings."""

import pytest
from logged_runs import uninterrupted_and_resumed
from opened import job

from steadyrl.agents.rnd.extension import PPORND
from steadyrl.core.errors import SettingError
from steadyrl.memory.budget import memory_plan
from steadyrl.training.setup import build
from tests.test_killed import PPO as KILLED
from tests.test_killed import SHORT as KILLED_SHORT
from tests.test_killed import compare_killed_with_uninterrupted

PPO = (
    "agent=ppo", "env=cartpole", "env.num_envs=2", "device=cpu", "agent.hidden=[16]",
    "agent.rollout_steps=32", "agent.epochs=2", "agent.minibatches=2", "agent.compile=false",
    "agent.rnd.coef=1",
)  # fmt: skip
SHORT = ("total_steps=300", "eval.every=100", "eval.episodes=2", "log.every=100")
RND = {
    "alone": (),
    "with all options": (
        "agent.recurrent.cell=gru", "agent.recurrent.sequence_length=5", "agent.normalize_obs=true",
        "agent.normalize_reward=true", "agent.popart=true", "agent.rnd.fraction=0.9",
    ),
    "teacher": ("agent.teacher.policy=pole_teacher:Pole", "agent.teacher.acts=0.5"),
}  # fmt: skip


@pytest.mark.parametrize("name", RND)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, name):
    run_job = job(tmp_path, *PPO, *RND[name], *SHORT, quick=False)
    run, second, whole, parts = uninterrupted_and_resumed(run_job, 210)
    assert parts == whole and "train/rnd_loss" in whole[-1][1]
    assert second.summary.weights_sha256 == run.summary.weights_sha256


def test_the_memory_budget_covers_rnds_allocations(tmp_path, monkeypatch):
    requested = {}
    monkeypatch.setattr(
        "steadyrl.agents.rnd.rnd.require", lambda *what, **rest: requested.update([what])
    )
    with build(job(tmp_path, *PPO, *SHORT, quick=False)) as (_, agent):
        assert isinstance(agent._extensions[0], PPORND)
        assert 2 * 33 * 16 * 4 < agent.nbytes()["curiosity"] <= requested["RND (agent.rnd)"]


def test_messages_about_memory_call_rnd_by_its_key(tmp_path):
    with build(job(tmp_path, *PPO, *SHORT, quick=False)) as (_, agent):
        plan = memory_plan(agent.nbytes(), None)
    assert ", RND (agent.rnd) " in plan and "curiosity" not in plan


@pytest.mark.parametrize(
    "wrong", ["agent.rnd.coef=-1", "agent.rnd.gamma=2", "agent.rnd.fraction=1.5"]
)
def test_invalid_rnd_settings_are_rejected(tmp_path, wrong):
    with pytest.raises(SettingError, match=r"agent\.rnd\."):
        job(tmp_path, *PPO, wrong, quick=False)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_killed_runs_resume_to_the_same_result(tmp_path, compiled):
    more = ("agent.rnd.coef=1", f"agent.compile={compiled}")
    fates = compare_killed_with_uninterrupted(tmp_path, (*KILLED_SHORT, *KILLED, *more), kills=2)
    assert len(fates) >= 2
