"""Runs with a teacher: found wherever it is, continued with the same, refused where it is odd."""

from pathlib import Path

import pytest
import torch
import warm
from logged_runs import Lines, in_one_and_in_two_parts, opened, train
from opened import job

from steadyrl.agents.distillation.teacher import TeacherError
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.core.errors import ExpectedError, SettingError
from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.setup import build
from tests.test_killed import hold_killed_against_whole

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
LEADS = "agent.teacher.acts=0.5"
DOORS = ("env.id=masked_envs:Doors-v0", "+env.kwargs.doors=9", "env.max_restarts=0")
MASKED = (*DOORS, "agent.teacher.policy=pole_teacher:Anywhere")  # who mostly names closed doors
TAUGHT = {
    "ppo": (*PPO, "agent.normalize_obs=true", "agent.popart=true", LEADS),
    "ppo that looks on": (*PPO, "agent.anneal_entropy_coef=linear", "agent.entropy_coef=0.01"),
    "dqn": (*DQN, LEADS),
    "dqn with all": (*DQN, *ALL),
    "ppo that remembers": (
        *PPO,
        "agent.recurrent.cell=gru",
        "agent.recurrent.sequence_length=6",
        LEADS,
    ),
    "ppo with masks": (*PPO, *MASKED, LEADS),
    "dqn with masks": (*DQN, *MASKED, LEADS),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A finished policy of PPO, which knows little."""
    run, _, _ = warm.run(tmp_path_factory.mktemp("teacher"), *PPO, *SHORT, quick=False)
    return Path(run)


@pytest.mark.parametrize("name", TAUGHT)
def test_a_run_in_two_parts_is_the_same_as_in_one(tmp_path, policy, name):
    told = job(tmp_path, f"agent.teacher.policy={policy}", *TAUGHT[name], *SHORT, quick=False)
    run, second, whole, parts = in_one_and_in_two_parts(told, 110)
    assert parts == whole and run.summary.updates > 9
    assert "train/teacher_loss" in whole[-1][1]
    assert second.summary.weights_sha256 == run.summary.weights_sha256


def test_a_policy_is_found_from_anywhere_and_only_the_same_one_goes_on(
    tmp_path, policy, monkeypatch
):
    monkeypatch.chdir(policy.parent)
    told = job(tmp_path, *PPO, *SHORT, f"agent.teacher.policy={policy.name}", quick=False)
    assert (
        told.config["agent"]["teacher"]["policy"]
        == str(policy)
        == told.settings.agent.teacher.policy
    )
    with build(told) as (_, agent):
        state = agent.state_dict()
        state["teacher_guide"]["teacher"] = "0" * 64
        with pytest.raises(TeacherError, match="other weights than when the run began"):
            agent.load_state_dict(state)


def test_another_teacher_is_refused_when_a_run_goes_on(tmp_path, policy):
    run, _, _ = warm.run(tmp_path, *PPO, *SHORT, f"agent.teacher.policy={policy}", quick=False)
    resume = f"resume={run}"
    for other in ("agent.teacher.policy=null", "agent.teacher.coef=0.5"):
        with pytest.raises(SettingError, match="cannot change when a run is continued"):
            job(tmp_path, resume, other, quick=False)
    _, told, _ = warm.run(tmp_path, resume, "total_steps=400", quick=False)
    assert told["steps"] >= 400 and told["resumed_from_step"] >= 300


def test_a_module_teaches_when_it_is_typed_and_never_by_a_checkpoint_alone(tmp_path):
    pole = "agent.teacher.policy=pole_teacher:Pole"
    slow = ("agent.learning_rate=3e-4", "agent.normalize_obs=false", "agent.normalize_reward=false")
    leads = (*SHORT, *slow, pole, "agent.teacher.acts=1")
    run, told, _ = warm.run(tmp_path, *PPO, *leads, quick=False)
    assert told["return_mean"] > 60  # it plays well, and mostly it is its turn
    longer = (f"resume={run}", "total_steps=400")
    with pytest.raises(CheckpointError, match=r"type agent\.teacher\.policy=… with"):
        job(tmp_path, *longer, quick=False)
    _, told, _ = warm.run(tmp_path, *longer, pole, quick=False)
    assert told["steps"] >= 400 and told["resumed_from_step"] >= 300


def test_a_teacher_that_says_nothing_ends_the_run_in_a_line(tmp_path):
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
def test_who_is_no_teacher_is_refused(tmp_path, teacher, reason):
    told = job(tmp_path, *PPO, *SHORT, f"agent.teacher.policy={teacher}", quick=False)
    with pytest.raises(ExpectedError, match=reason) as refused, build(told):
        pass
    assert refused.value.exit_code == 2


def test_a_policy_of_other_spaces_is_refused_in_a_line(tmp_path, policy):
    asked = (
        *PPO,
        *SHORT,
        "env=acrobot",
        f"agent.teacher.policy={policy}",
        f"run_dir={tmp_path / 'run'}",
    )
    _, _, printed = warm.run(tmp_path, *asked, quick=False, code=2)
    assert "agent.teacher.policy=" in printed and "observations" in printed and "actions" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("masked", ["auto", "false"])
@pytest.mark.parametrize("agent", [PPO, DQN])
def test_a_policy_with_or_without_masks_teaches_what_is_allowed(tmp_path, agent, masked):
    asked = (*agent, *DOORS, "+env.kwargs.punish=true", *SHORT)
    run, _, _ = warm.run(tmp_path, *asked, f"env.action_masks={masked}", quick=False)
    with build(job(tmp_path, *asked, f"agent.teacher.policy={run}", quick=False)) as (env, student):
        obs = torch.from_numpy(env.reset())
        teacher_target = torch.full((env.spec.num_envs, 9), torch.nan)
        taught = student if hasattr(student, "_teacher_guide") else student._extensions[0]
        taught._teacher_guide.write_targets_(obs, teacher_target)
        allowed = Masks.of(env.spec, obs.device).allowed(obs)
        assert not teacher_target[~allowed].any()
        torch.testing.assert_close(teacher_target.sum(1), torch.ones(len(teacher_target)))


def test_a_policy_with_masks_teaches_nobody_without(tmp_path):
    asked = (*PPO, *DOORS, "+env.kwargs.punish=true", *SHORT)
    run, _, _ = warm.run(tmp_path, *asked, quick=False)
    told = job(
        tmp_path, *asked, f"agent.teacher.policy={run}", "env.action_masks=false", quick=False
    )
    with pytest.raises(SettingError, match="observations"), build(told):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dqn", "dqn with all", "ppo that remembers"])
def test_a_compiled_student_learns_as_an_eager_one(tmp_path, policy, name):
    weights = []
    for compiled in ("false", "true"):
        asked = (
            f"agent.teacher.policy={policy}",
            *TAUGHT[name],
            *SHORT,
            f"agent.compile={compiled}",
        )
        told = job(tmp_path, *asked, quick=False)
        with build(told) as (env, agent):
            env.reset()
            train(opened(told, agent, Lines()), env, agent, 120)
            assert isinstance(agent._learner, Learner) and agent.updates > 3
            weights.append(agent._learner.network.weights.clone())
    assert (weights[0] - weights[1]).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", TAUGHT)
def test_kills_change_nothing(tmp_path, policy, name):
    more = ("total_steps=8000", "eval.every=1000", "checkpoint.every=150", "log.every=500")
    fates = hold_killed_against_whole(
        tmp_path, (f"agent.teacher.policy={policy}", *TAUGHT[name], *more), kills=3
    )
    assert len(fates) >= 3
