"""Distillation: its loss against loops and finite differences, and its effect on students."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from changed import changed
from ppo_agents import CPU, SETTINGS, SPACES, Episodes, act, collect, extension, learn

from steadyrl.agents.distillation.extension import DQNTeacher, PPOTeacher
from steadyrl.agents.distillation.loss import (
    cross_entropy,
    distilled_ppo_loss,
    distilled_td_loss,
    student_ppo_loss,
    with_student_samples,
)
from steadyrl.agents.distillation.teacher import ObjectTeacher, TeacherError
from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.dqn.loss import td_loss
from steadyrl.agents.dqn.q_heads import ScalarHead
from steadyrl.agents.networks.distributions import build_head
from steadyrl.agents.ppo.agent import PPO
from steadyrl.agents.ppo.loss import METRICS, evaluate_batch, ppo_loss, value_loss
from steadyrl.buffers.replay.buffer import ReplayBatch
from steadyrl.buffers.rollout.buffer import RolloutBatch, batch_type
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import BoxActions, DiscreteActions, EnvSpec
from tests.agents.dqn.test_agent import SETTINGS as DQN_SETTINGS
from tests.agents.ppo.test_recurrent import Loop


def by_sign(obs):
    """The perfect teacher of a game whose optimal action is the sign of the first input."""
    return (obs[:, 0] > 0).astype(np.int64)


def distilled_dqn(settings, spec, *, teacher, **numbers):
    """Return DQN with a teacher."""
    extension = DQNTeacher(settings, spec, teacher=teacher, **numbers)
    return DQN(settings, spec, extensions=[extension], **numbers)


def distilled_ppo(settings, spec, *, teacher, **numbers):
    """Return PPO with a teacher."""
    extension = PPOTeacher(settings, spec, teacher=teacher, **numbers)
    return PPO(settings, spec, extensions=[extension], **numbers)


def distilled_loss(value_coef):
    """Return PPO's loss with the distillation term, where the teacher acts too."""
    head, evaluate = build_head(DiscreteActions(3), CPU), evaluate_batch
    how = {"evaluate": evaluate, "value_loss": value_loss, "value_coef": value_coef}
    loss = partial(ppo_loss, head=head, **how)
    student = partial(student_ppo_loss, loss=loss, evaluate=evaluate, metrics=METRICS)
    return partial(distilled_ppo_loss, loss=student, head=head)


def student(
    kind, teach=by_sign, *, envs=3, action=SPACES["discrete"], total=2000, spec=None, **changes
):
    spec = spec or EnvSpec("Synthetic", envs, (4,), "float32", 1, action)
    settings = changed(
        SETTINGS if kind is distilled_ppo else DQN_SETTINGS, teacher__policy="t", **changes
    )
    teacher = ObjectTeacher("t", action, teach)
    return kind(settings, spec, device=CPU, seed=0, total_steps=total, teacher=teacher)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cross_entropy_equals_a_loop():
    parameters, teacher_target = random(5, 3), random(5, 3, seed=1).softmax(1)
    found = cross_entropy(build_head(DiscreteActions(3), CPU), parameters, teacher_target)
    for row, logits in enumerate(parameters.tolist()):
        log_sum = math.log(sum(map(math.exp, logits)))
        each = zip(teacher_target[row].tolist(), logits, strict=True)
        assert found[row].item() == pytest.approx(-sum(p * (x - log_sum) for p, x in each))


def test_cross_entropy_of_a_box_is_the_negative_log_prob_of_the_teachers_action():
    head = build_head(BoxActions((0.0,), (10.0,)), CPU)
    assert head.from_env(head.to_env(torch.tensor([[0.3]]))).item() == pytest.approx(0.3)
    fixed = build_head(BoxActions((0.5, -1.0), (0.5, 1.0)), CPU)
    assert fixed.from_env(torch.tensor([[0.5, 0.3]])).tolist() == [[0.0, pytest.approx(0.3)]]
    action = head.from_env(torch.tensor([[7.5]]))  # half way from the middle to the bound
    found = cross_entropy(head, torch.tensor([[0.2, math.log(2)]]), action).item()
    assert found == pytest.approx((0.5 - 0.2) ** 2 / 8 + math.log(2) + 0.5 * math.log(2 * math.pi))


def ppo_rows(network, seed=0):
    head = build_head(DiscreteActions(3), CPU)
    obs, action = random(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    own = torch.tensor([True, False] * 3)
    log_prob = head.log_prob(network(obs)[0].detach(), action) + 0.05
    parts = (random(6, seed=seed + i) for i in (2, 3, 4))
    kind = batch_type(RolloutBatch, "teacher_target", "student_acted", after=6)
    batch = kind(obs, action, log_prob, *parts, random(6, 3).softmax(1), own)
    return with_student_samples(
        batch, torch.full((6,), 1 / 6, dtype=torch.float64), preprocess=None
    )


def linear(weights):
    return lambda obs: (obs @ weights[:, :3], (obs @ weights[:, 3:]).squeeze(1))


def test_the_gradient_of_ppo_distillation_equals_finite_differences():
    batch = ppo_rows(linear(random(4, 4)))

    def loss(weights):
        return distilled_loss(0.5)(linear(weights), batch, 0.7, 0.2, 0.01).loss

    assert torch.autograd.gradcheck(loss, random(4, 4).requires_grad_())


def test_samples_of_the_teacher_have_no_policy_loss():
    batch, weights = ppo_rows(linear(random(4, 4))), random(4, 4).requires_grad_()
    rows = distilled_loss(0.0)(linear(weights), batch, 0.0, 0.2, 0.0)
    for row, own in zip(rows.loss, batch.student_acted, strict=True):
        (gradient,) = torch.autograd.grad(row, weights, retain_graph=True)
        assert bool(gradient.abs().sum() > 0) == bool(own)


def test_improbable_teacher_actions_keep_kl_and_loss_finite():
    batch, weights = ppo_rows(linear(random(4, 4))), random(4, 4).requires_grad_()
    batch = batch._replace(
        log_prob=torch.where(batch.student_acted, batch.log_prob, -1e3)
    )  # a ratio of e^1000
    rows = distilled_loss(0.5)(linear(weights), batch, 0.7, 0.2, 0.01)
    (gradient,) = torch.autograd.grad(rows.loss.sum(), weights)
    assert gradient.isfinite().all()
    _, _, _, kl, clipped, _ = rows.metrics
    assert torch.equal(kl > 0, batch.student_acted)
    assert not clipped[~batch.student_acted].any()


def at_the_bounds(obs):
    return np.ones((len(obs), 2), np.float32)


@pytest.mark.parametrize("recurrent", ["none", "gru"])
@pytest.mark.parametrize("deviation", [-2.0, -4.0])
def test_a_deterministic_student_learns_while_the_teacher_acts(deviation, recurrent):
    action = BoxActions((-1.0, -1.0), (1.0, 1.0))
    options = {"log_std_init": deviation, "teacher__acts": 0.9, "recurrent__cell": recurrent}
    agent = student(distilled_ppo, at_the_bounds, action=action, **options)
    found = Loop(agent).play(
        10 * 16
    )  # without the bound: NaN in the fourth update, or a KL divergence of 10^12
    assert len(found) == 10
    assert max(metrics["train/approx_kl"] for metrics in found) < 1


def test_the_gradient_of_dqn_distillation_equals_finite_differences():
    obs, after, action = random(6, 4), random(6, 4, seed=1), torch.tensor([0, 1, 2, 0, 1, 2])
    numbers = [random(6, seed=i) for i in (2, 3)]
    teacher_target, weight = random(6, 3).softmax(1), random(6, seed=4).abs()
    batch = batch_type(ReplayBatch, "teacher_target", after=7)(
        obs, action, numbers[0], numbers[1], after, weight, action, teacher_target
    )
    head, target = ScalarHead(huber=True), random(4, 3, seed=5)
    hard = partial(td_loss, head=head, double=False)
    loss = partial(distilled_td_loss, loss=hard, head=head, temperature=0.5)

    def each(weights, coef=0.7):
        return loss(lambda obs: obs @ weights, lambda obs: obs @ target, batch, coef).loss

    weights = random(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(each, weights)
    log_p = (obs @ weights / 0.5).log_softmax(1)
    added = -(teacher_target * log_p).sum(1) * weight * 0.7
    torch.testing.assert_close(each(weights) - each(weights, 0.0), added)


@pytest.mark.parametrize("kind", [distilled_ppo, distilled_dqn])
def test_distillation_imitates_a_perfect_teacher(kind):
    seen = Episodes(envs=200, seed=9).reset()

    def agreement(coef):
        changes = {"learning_rate": 1e-2, "teacher__coef": coef, "teacher__fraction": 1.0}
        agent = student(kind, action=DiscreteActions(2), total=1000, **changes)
        env = Episodes()
        obs = env.reset()
        if kind is distilled_ppo:
            learn(agent, env, obs, 8)
        else:
            for _ in range(150):
                obs = collect(agent, env, obs, 1)
                agent.update()
        assert agent.updates > 50
        return (act(agent, seen, explore=False).env_action.numpy() == by_sign(seen)).mean()

    assert agreement(1.0) > 0.9
    assert agreement(0.0) < 0.8


def test_the_teacher_is_not_queried_once_its_coefficient_is_zero():
    batch_sizes = []

    def teach(obs):
        batch_sizes.append(len(obs))
        return by_sign(obs)

    agent = student(
        distilled_ppo, teach, total=16 * 3 * 10, teacher__coef=2.0, teacher__fraction=0.3
    )
    env, coefs, losses = Episodes(mean_length=1e9), [], []
    obs = env.reset()
    for _ in range(6):
        coefs.append(agent.scalars()["train/teacher_coef"])
        (found,), obs = learn(agent, env, obs, 1)
        losses.append(found["train/teacher_loss"])
    assert min(losses[:3]) > 0 and losses[3:] == [0, 0, 0]
    assert coefs == pytest.approx([2, 4 / 3, 2 / 3, 0, 0, 0])
    assert sum(batch_sizes) == 3 * 16 * 3


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("normalised", [False, True])
def test_the_teachers_turns_are_annealed(name, normalised):
    action, seen = SPACES[name], []
    head = build_head(action, CPU)

    def teach(obs):
        seen.append(obs.copy())
        shape = (len(obs), *head.action_shape)
        return np.zeros(shape, np.int64) if name != "box" else np.full(shape, 1e-3)

    agent = student(
        distilled_ppo, teach, action=action, teacher__acts=0.1, normalize_obs=normalised, total=960
    )
    env = Episodes(scale=50)
    obs, first, teacher_fractions = env.reset(), None, []
    for row in range(48):
        decision = act(agent, obs)
        if row == 0:  # β is 1: the teacher acts
            first = decision.env_action.numpy()
        teacher_fractions.append(extension(agent)._teacher_guide.teacher_acted.mean())
        step = env.step()
        agent.observe(decision, step)
        obs = step.obs
        agent.update()
    np.testing.assert_allclose(first, teach(np.zeros((3, 4))))
    assert (
        teacher_fractions[0] == 1
        and sum(teacher_fractions[40:]) == 0
        and 0 < np.mean(teacher_fractions) < 1
    )
    assert np.abs(np.concatenate(seen)).max() > 20  # the teacher sees unnormalised observations
    teacher_target = agent._rollout.fields["teacher_target"].float()
    assert torch.isfinite(teacher_target).all()


GIVEN = {
    "NaN": lambda obs: np.full((len(obs), 3), np.nan),
    "shape": lambda obs: np.zeros((len(obs), 2)),
    "integers from": lambda obs: np.full(len(obs), 3),
    "sum to 1": lambda obs: np.ones((len(obs), 3)),
    "act failed: ZeroDivisionError": lambda obs: 1 / 0,
    "expected numbers": lambda obs: ["left"] * len(obs),
    "read-only": lambda obs: obs.fill(0),
}


@pytest.mark.parametrize("what", GIVEN)
def test_invalid_predictions_are_rejected_with_the_teachers_name(what):
    teacher = ObjectTeacher("mine:Bad", DiscreteActions(3), GIVEN[what])
    with pytest.raises(TeacherError, match=f"agent.teacher.policy=mine:Bad: .*{what}"):
        teacher.predict(torch.zeros(5, 4))
    assert TeacherError.exit_code == 2


@pytest.mark.parametrize("name", ["multidiscrete", "multibinary", "box"])
def test_predicted_actions_are_validated_for_every_space(name):
    shape = (5, *build_head(SPACES[name], CPU).action_shape)
    fine = ObjectTeacher("t", SPACES[name], lambda obs: np.zeros(shape))
    assert fine.predict(torch.zeros(5, 4)).shape == shape
    for bad in (np.zeros((5, 9)), np.full(shape, np.inf if name == "box" else 7)):
        with pytest.raises(TeacherError, match=r"agent\.teacher\.policy=t"):
            ObjectTeacher("t", SPACES[name], lambda obs, bad=bad: bad).predict(torch.zeros(5, 4))


def test_invalid_teacher_settings_are_rejected():
    for settings in (SETTINGS, DQN_SETTINGS):
        with pytest.raises(SettingError, match="torchrun"):
            changed(settings, teacher__policy="t").of_rank(0, 2)
        for change in ({"teacher__policy": " "}, {"teacher__coef": -1.0}, {"teacher__acts": 1.5}):
            with pytest.raises(SettingError, match=next(iter(change)).partition("__")[2]):
                changed(settings, **change)
