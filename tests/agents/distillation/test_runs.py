"""Runs with a teacher: lookup, resuming with the same one, rejection of an invalid one."""

import shutil
from pathlib import Path

import pytest
import torch
import warm
from logged_runs import Lines, opened, train, uninterrupted_and_resumed
from opened import job

from steadyrl import loop
from steadyrl.agents.distillation.teacher import TeacherError
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.core.errors import ExpectedError, SettingError
from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.setup import build
from tests.test_killed import compare_killed_with_uninterrupted

PPO = (
    "agent=ppo", "env=cartpole", "env.num_envs=2", "device=cpu", "agent.hidden=[16]",
    "agent.rollout_steps=32", "agent.epochs=2", "agent.minibatches=2", "agent.compile=false",
)  # fmt: skip
DQN = (
    "agent=dqn", "env=cartpole", "env.num_envs=2", "device=cpu", "agent.hidden=[16]",
    "agent.learning_starts=50", "agent.train_every=8", "agent.updates_per_train=1",
    "agent.compile=false",
)  # fmt: skip
ALL = (
    "agent.double=true", "agent.dueling=true", "agent.munchausen.enabled=true",
    "agent.noisy.enabled=true",
    "agent.distribution.kind=quantile", "agent.replay.prioritized=true",
    "agent.grad_accumulation=2",
)  # fmt: skip
SHORT = ("total_steps=300", "eval.every=100", "eval.episodes=2", "log.every=100")
TEACHER_ACTS = "agent.teacher.acts=0.5"
DOORS = ("env.id=masked_envs:Doors-v0", "+env.kwargs.doors=9", "env.max_restarts=0")
MASKED = (*DOORS, "agent.teacher.policy=pole_teacher:Anywhere")  # mostly chooses closed doors
DISTILLED = {
    "ppo": (*PPO, "agent.normalize_obs=true", "agent.popart=true", TEACHER_ACTS),
    "ppo, student acts": (*PPO, "agent.anneal_entropy_coef=linear", "agent.entropy_coef=0.01"),
    "dqn": (*DQN, TEACHER_ACTS),
    "dqn with all options": (*DQN, *ALL),
    "ppo recurrent": (
        *PPO,
        "agent.recurrent.cell=gru",
        "agent.recurrent.sequence_length=6",
        TEACHER_ACTS,
    ),
    "ppo with masks": (*PPO, *MASKED, TEACHER_ACTS),
    "dqn with masks": (*DQN, *MASKED, TEACHER_ACTS),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Return the run directory of a briefly trained PPO policy."""
    run, _, _ = warm.run(tmp_path_factory.mktemp("teacher"), *PPO, *SHORT, quick=False)
    return Path(run)


@pytest.mark.long
@pytest.mark.parametrize("name", DISTILLED)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, policy, name):
    run_job = job(tmp_path, f"agent.teacher.policy={policy}", *DISTILLED[name], *SHORT, quick=False)
    run, second, whole, parts = uninterrupted_and_resumed(run_job, 110)
    assert parts == whole and run.summary.updates > 9
    assert "train/teacher_loss" in whole[-1][1]
    assert second.summary.weights_sha256 == run.summary.weights_sha256


def test_teacher_paths_become_absolute_and_weights_must_match_on_resume(
    tmp_path, policy, monkeypatch
):
    monkeypatch.chdir(policy.parent)
    run_job = job(tmp_path, *PPO, *SHORT, f"agent.teacher.policy={policy.name}", quick=False)
    assert (
        run_job.config["agent"]["teacher"]["policy"]
        == str(policy)
        == run_job.settings.agent.teacher.policy
    )
    with build(run_job) as (_, agent):
        state = agent.state_dict()
        state["teacher_guide"]["teacher"] = "0" * 64
        with pytest.raises(TeacherError, match="other weights than when the run began"):
            agent.load_state_dict(state)


def test_resuming_with_another_teacher_is_rejected(tmp_path, policy):
    run, _, _ = warm.run(tmp_path, *PPO, *SHORT, f"agent.teacher.policy={policy}", quick=False)
    resume = f"resume={run}"
    for other in ("agent.teacher.policy=null", "agent.teacher.coef=0.5"):
        with pytest.raises(SettingError, match="cannot change when a run is continued"):
            job(tmp_path, resume, other, quick=False)
    _, summary, _ = warm.run(tmp_path, resume, "total_steps=400", quick=False)
    assert summary["steps"] >= 400 and summary["resumed_from_step"] >= 300


def test_a_teacher_that_moved_is_found_where_the_command_says(tmp_path, policy):
    there, here = tmp_path / "there", tmp_path / "here"
    shutil.copytree(policy, there)
    run, _, _ = warm.run(tmp_path, *PPO, *SHORT, f"agent.teacher.policy={there}", quick=False)
    there.rename(here)
    longer = (f"resume={run}", "total_steps=400")
    with pytest.raises(TeacherError, match="resume with the same teacher"):
        loop.train(job(tmp_path, *longer, f"agent.teacher.policy={run}", quick=False))
    _, summary, _ = warm.run(tmp_path, *longer, f"agent.teacher.policy={here}", quick=False)
    assert summary["steps"] >= 400 and summary["resumed_from_step"] >= 300


def test_module_teachers_must_be_given_again_on_resume(tmp_path):
    teacher = "agent.teacher.policy=pole_teacher:Pole"
    untuned = (
        "agent.learning_rate=3e-4",
        "agent.normalize_obs=false",
        "agent.normalize_reward=false",
    )
    options = (*SHORT, *untuned, teacher, "agent.teacher.acts=1")
    run, summary, _ = warm.run(tmp_path, *PPO, *options, quick=False)
    assert summary["return_mean"] > 60  # a good teacher acts most of the time
    longer = (f"resume={run}", "total_steps=400")
    with pytest.raises(
        CheckpointError,
        match=r"name it again.*\n.* agent\.teacher\.policy=pole_teacher:Pole",
    ):
        job(tmp_path, *longer, quick=False)
    _, summary, _ = warm.run(tmp_path, *longer, teacher, quick=False)
    assert summary["steps"] >= 400 and summary["resumed_from_step"] >= 300


def test_nan_predictions_of_a_teacher_end_the_run_in_one_line(tmp_path):
    nan = "agent.teacher.policy=pole_teacher:Nan"
    _, _, printed = warm.run(tmp_path, *PPO, *SHORT, nan, quick=False, code=2)
    assert (
        "error: agent.teacher.policy=pole_teacher:Nan: returned NaN or infinite numbers" in printed
    )


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        ("nowhere", "no such run or policy"),
        ("no_such_module:Pole", "cannot import no_such_module"),
        ("pole_teacher:Nobody", "has no Nobody"),
        ("pole_teacher:nobody", "has no act"),
    ],
)
def test_invalid_teachers_are_rejected(tmp_path, teacher, reason):
    run_job = job(tmp_path, *PPO, *SHORT, f"agent.teacher.policy={teacher}", quick=False)
    with pytest.raises(ExpectedError, match=reason) as refused, build(run_job):
        pass
    assert refused.value.exit_code == 2


def test_teachers_of_other_spaces_are_rejected_in_one_line(tmp_path, policy):
    overrides = (
        *PPO,
        *SHORT,
        "env=acrobot",
        f"agent.teacher.policy={policy}",
        f"run_dir={tmp_path / 'run'}",
    )
    _, _, printed = warm.run(tmp_path, *overrides, quick=False, code=2)
    assert "agent.teacher.policy=" in printed and "observations" in printed and "actions" in printed
    assert not (tmp_path / "run").exists()


def test_recurrent_teachers_are_rejected_in_one_line(tmp_path):
    run, _, _ = warm.run(tmp_path, *PPO, *SHORT, "agent.recurrent.cell=gru", quick=False)
    overrides = (*DQN, *SHORT, f"agent.teacher.policy={run}", f"run_dir={tmp_path / 'student'}")
    _, _, printed = warm.run(tmp_path, *overrides, quick=False, code=2)
    reason = "has a hidden state (agent.recurrent.cell=gru), which a teacher cannot have"
    assert f"agent.teacher.policy={run}: {reason}" in printed
    assert not (tmp_path / "student").exists()


@pytest.mark.parametrize("masked", ["auto", "false"])
@pytest.mark.parametrize("agent", [PPO, DQN])
def test_teacher_targets_are_zero_for_forbidden_actions(tmp_path, agent, masked):
    overrides = (*agent, *DOORS, "+env.kwargs.punish=true", *SHORT)
    run, _, _ = warm.run(tmp_path, *overrides, f"env.action_masks={masked}", quick=False)
    with build(job(tmp_path, *overrides, f"agent.teacher.policy={run}", quick=False)) as (
        env,
        student,
    ):
        obs = torch.from_numpy(env.reset())
        teacher_target = torch.full((env.spec.num_envs, 9), torch.nan)
        student._extensions[0]._teacher_guide.write_targets_(obs, teacher_target)
        allowed = Masks.of(env.spec, obs.device).allowed(obs)
        assert not teacher_target[~allowed].any()
        torch.testing.assert_close(teacher_target.sum(1), torch.ones(len(teacher_target)))


def test_masked_teachers_are_rejected_by_unmasked_students(tmp_path):
    overrides = (*PPO, *DOORS, "+env.kwargs.punish=true", *SHORT)
    run, _, _ = warm.run(tmp_path, *overrides, quick=False)
    run_job = job(
        tmp_path, *overrides, f"agent.teacher.policy={run}", "env.action_masks=false", quick=False
    )
    with pytest.raises(SettingError, match="observations"), build(run_job):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dqn", "dqn with all options", "ppo recurrent"])
def test_compiled_students_learn_the_same_as_eager_ones(tmp_path, policy, name):
    weights = []
    for compiled in ("false", "true"):
        overrides = (
            f"agent.teacher.policy={policy}",
            *DISTILLED[name],
            *SHORT,
            f"agent.compile={compiled}",
        )
        run_job = job(tmp_path, *overrides, quick=False)
        with build(run_job) as (env, agent):
            env.reset()
            train(opened(run_job, agent, Lines()), env, agent, 120)
            assert isinstance(agent._learner, Learner) and agent.updates > 3
            weights.append(agent._learner.network.weights.clone())
    assert (weights[0] - weights[1]).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTILLED)
def test_killed_runs_resume_to_the_same_result(tmp_path, policy, name):
    more = ("total_steps=8000", "eval.every=1000", "checkpoint.every=150", "log.every=500")
    fates = compare_killed_with_uninterrupted(
        tmp_path, (f"agent.teacher.policy={policy}", *DISTILLED[name], *more), kills=3
    )
    assert len(fates) >= 3
