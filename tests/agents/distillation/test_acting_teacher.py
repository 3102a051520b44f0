"""PPO with a teacher that acts: what is the student's, against loops over its samples."""

import pytest
import torch

from steadyrl.agents.distillation.loss import with_student_samples
from steadyrl.agents.ppo.loss import evaluate_batch, evaluate_sequences, with_normalised_advantages
from steadyrl.buffers.rollout.buffer import RolloutBatch, batch_type
from tests.agents.distillation.test_loss import distilled_ppo, random, student
from tests.agents.distillation.test_masks_and_recurrence import MASKED, MaskedLoop, stochastic
from tests.agents.learner.test_learner import as_traced
from tests.agents.ppo.test_recurrent import ROWS, Loop

KINDS = {
    "plain": {},
    "uneven minibatches": {"minibatches": 5},
    "microbatches": {"grad_accumulation": 3},
    "recurrent": {"recurrent__cell": "gru"},
    "recurrent, microbatches": {"recurrent__cell": "lstm", "grad_accumulation": 2},
    "traced": {"compile": "true", "minibatches": 5},
    "traced, microbatches": {"compile": "true", "minibatches": 5, "grad_accumulation": 3},
    "traced, recurrent": {"compile": "true", "recurrent__cell": "gru"},
    "masks": {"spec": MASKED, "action": MASKED.action},
}


def acting(changes):
    """Return a student whose teacher acts half of the time, and its environments."""
    options = {"learning_rate": 0.02, "epochs": 3, "teacher__acts": 1.0, "total": 640, **changes}
    agent = student(distilled_ppo, stochastic, **options)
    if "compile" in changes:
        as_traced(agent._learner)
    return agent, (MaskedLoop if "spec" in changes else Loop)(agent)


def compared(agent):
    """Record every step's metrics of the student, and the same by a loop over its samples."""
    seen, learner, rollout = [], agent._learner, agent._rollout
    step, head = learner.train_step, agent._actor._head

    def record(batch, weight, rate, coef, clip):
        if batch[0].dtype == torch.int64:  # indices
            indices = batch[0][weight > 0]
            samples = rollout.sample_type(*(each[indices] for each in batch[1:]))
            counted = torch.ones(len(indices), dtype=torch.bool)
        else:
            samples, counted = batch, torch.ones(len(batch.return_), dtype=torch.bool)
            if isinstance(weight, torch.Tensor):
                counted = weight > 0
        recurrent = agent._settings.recurrent.cell != "none"
        evaluate = evaluate_sequences if recurrent else evaluate_batch
        with torch.no_grad():
            found = evaluate(learner.network.module.forward, samples, head)
        own = counted & samples.student_acted
        log_ratio = (found.log_prob - samples.log_prob)[own].double()
        advantage, ratio = samples.advantage[own].double(), log_ratio.exp()
        means = dict.fromkeys(("train/approx_kl", "train/clip_fraction", "train/policy_loss"), 0.0)
        if own.any():
            means["train/approx_kl"] = (ratio - 1 - log_ratio).mean().item()
            means["train/clip_fraction"] = ((ratio - 1).abs() > clip).double().mean().item()
            normal = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
            clipped = torch.minimum(ratio * normal, ratio.clamp(1 - clip, 1 + clip) * normal)
            means["train/policy_loss"] = -clipped.sum().item() / int(counted.sum())
        result = step(batch, weight, rate, coef, clip)
        metrics = dict(zip(learner.means.names[:-1], result.metrics.tolist(), strict=True))
        seen.append((metrics, means, own.sum().item() / counted.sum().item()))
        return result

    learner.train_step = record
    return seen


def played(kind):
    """Return what `compared` has of the updates of four rollouts."""
    agent, loop = acting(KINDS[kind])
    loop.play(5 * ROWS)
    seen = compared(agent)
    loop.play(4 * ROWS)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_kl_and_clip_fraction_are_of_the_students_samples(kind):
    seen = played(kind)
    assert len({fraction for *_, fraction in seen if 0 < fraction < 1}) > 3
    assert max(means["train/approx_kl"] for _, means, _ in seen) > 1e-3
    assert max(means["train/clip_fraction"] for _, means, _ in seen) > 0
    for metrics, means, _ in seen:
        for name in ("train/approx_kl", "train/clip_fraction"):
            assert metrics[name] == pytest.approx(means[name], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_are_normalised_over_the_students_samples(kind):
    """The student's part of the policy loss is that of its advantages, normalised alone."""
    seen = played(kind)
    losses = [(each["train/policy_loss"], means["train/policy_loss"]) for each, means, _ in seen]
    assert max(abs(loss) for _, loss in losses) > 1e-2
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_better_teacher_does_not_make_the_students_advantages_negative():
    own = torch.tensor([True, False]).repeat(500)
    advantage = random(1000).float() + torch.where(own, -1.0, 1.0)
    batch = actions_of(own, advantage)
    weight = torch.full((1000,), 1e-3)
    found = with_student_samples(batch, weight, preprocess=with_normalised_advantages)
    mine = found.advantage[own]
    assert abs(mine.mean()) < 1e-5 and mine.std(correction=0) == pytest.approx(1, abs=1e-4)
    expected = (advantage[own] - advantage[own].mean()) / advantage[own].std(correction=0)
    torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
    assert not found.advantage[~own].any()


def test_the_target_kl_ends_epochs_by_the_students_kl():
    agent, loop = acting({"target_kl": 0.01, "epochs": 10})
    loop.play(5 * ROWS)
    seen, largest, rollouts = compared(agent), agent._settings.largest_kl, []
    for _ in range(4 * ROWS):
        before = len(seen)
        loop.row()
        if agent.update() is not None:
            rollouts.append(seen[before:])
    assert len(rollouts) == 4
    for rollout in rollouts:
        exceeding = [means["train/approx_kl"] > largest for _, means, _ in rollout]
        assert exceeding == [False] * (len(rollout) - 1) + [True]
    ends = [(means["train/approx_kl"], fraction) for *_, (_, means, fraction) in rollouts]
    assert any(kl * fraction < largest for kl, fraction in ends), "else a mean over all would do"


def actions_of(student_acted, advantage):
    """Return a batch in which the student took these actions, with these advantages."""
    kind, size = batch_type(RolloutBatch, "student_acted", after=6), len(advantage)
    obs, action, *parts = torch.zeros(size, 1), *torch.zeros(4, size)
    return kind(obs, action, *parts[:2], advantage, parts[2], student_acted)


def test_a_batch_without_the_students_samples_has_scale_and_advantages_zero():
    batch = actions_of(torch.zeros(4, dtype=torch.bool), random(4).float())
    weight = torch.full((4,), 0.25)
    found = with_student_samples(batch, weight, preprocess=with_normalised_advantages)
    assert found.student_scale.tolist() == found.advantage.tolist() == [0.0] * 4


def test_a_single_sample_of_the_student_has_advantage_zero_beside_padding():
    batch = actions_of(torch.tensor([True, False, True]), torch.tensor([2.0, -3.0, 2.0]))
    found = with_student_samples(batch, torch.tensor([0.5, 0.5, 0.0]), preprocess=None)
    assert found.advantage.tolist() == [0.0] * 3 and found.student_scale[0] == 2


def test_a_teacher_that_never_acts_leaves_the_batch_as_it_is():
    agent = student(distilled_ppo, stochastic)
    assert agent._learner._loss_spec.preprocess_batch is with_normalised_advantages
