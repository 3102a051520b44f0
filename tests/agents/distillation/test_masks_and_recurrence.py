"""Distillation with action masks and recurrent students, against loops over samples."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ppo_agents import CPU, Episodes, extension

from steadyrl.agents.distillation.loss import cross_entropy, distilled_td_loss
from steadyrl.agents.distillation.teacher import renormalize_allowed
from steadyrl.agents.dqn.loss import td_loss
from steadyrl.agents.dqn.q_heads import ScalarHead
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.ppo.loss import clipped_value_loss
from steadyrl.buffers.replay.buffer import ReplayBatch
from steadyrl.buffers.rollout.buffer import batch_type
from steadyrl.envs.types import DiscreteActions, EnvSpec
from tests.agents.distillation.test_loss import distilled_dqn, distilled_ppo, random, student
from tests.agents.ppo.test_recurrent import KINDS, ROWS, WHOLE, Loop, learned, normal, unrolled

MASKED = EnvSpec("Masked", 3, (5,), "float32", 1, DiscreteActions(3), (), 1)


def stochastic(obs):
    """A stochastic teacher."""
    probs = np.exp(obs[:, :3])
    return probs / probs.sum(1, keepdims=True)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=6))
def test_teacher_targets_are_renormalised_over_allowed_actions(actions):
    teacher_probs, allowed = ([each[i] for each in actions] for i in (0, 1))
    found = renormalize_allowed(torch.tensor([teacher_probs]), torch.tensor([allowed]))[0].tolist()
    allowed_probability = sum(np.float32(p) for p, ok in actions if ok)
    for p, (before, ok) in zip(found, actions, strict=True):
        if not ok:
            assert p == 0
        elif allowed_probability:
            assert p == pytest.approx(before / allowed_probability, rel=1e-4, abs=1e-30)
        else:
            assert p == pytest.approx(1 / sum(allowed))


def masked_rows(allowed, seed=0):
    """Return float64 observations [B, 5] with an action mask at the end."""
    bits = (torch.tensor(allowed).double() * torch.tensor([1.0, 2.0, 4.0])).sum(1, keepdim=True)
    return torch.cat((random(len(allowed), 4, seed=seed), bits), 1)


def test_dqn_distillation_uses_allowed_actions_only():
    allowed = [[True, True, False], [False, True, True], [False, False, True], [True] * 3]
    obs, after = masked_rows(allowed), masked_rows(allowed, seed=1)
    teacher_target = renormalize_allowed(random(4, 3, seed=2).softmax(1), torch.tensor(allowed))
    numbers, action = [random(4, seed=i).abs() for i in (3, 4, 5)], torch.tensor([0, 1, 2, 0])
    batch = batch_type(ReplayBatch, "teacher_target", after=7)(
        obs, action, *numbers[:2], after, numbers[2], action, teacher_target
    )
    masks = Masks.of(MASKED, CPU)
    masks._powers = masks._powers.double()
    shared = {"head": ScalarHead(huber=True), "masks": masks}
    hard = partial(td_loss, double=False, **shared)
    loss = partial(distilled_td_loss, loss=hard, temperature=0.5, **shared)
    weights = random(4, 3, seed=6).requires_grad_()

    def q(obs):
        return masks.features(obs) @ weights

    def each(coef):
        return loss(q, lambda obs: q(obs).detach(), batch, coef).loss

    expected = []
    for row, ok in enumerate(allowed):
        left = [a for a in range(3) if ok[a]]
        log_p = (q(obs)[row, left] / 0.5).log_softmax(0)
        expected.append(-numbers[2][row] * 0.7 * (teacher_target[row, left] * log_p).sum())
    torch.testing.assert_close(each(0.7) - each(0.0), torch.stack(expected))
    ours, theirs = each(0.7) - each(0.0), torch.stack(expected)
    gradients = (torch.autograd.grad(each.sum(), weights)[0] for each in (ours, theirs))
    torch.testing.assert_close(*gradients)


class Masking(Episodes):
    """Observations with masks of one or two allowed actions."""

    def reset(self):
        seen = super().reset()
        ok = np.tile([True, False, self.random.random() < 0.5], (len(seen), 1))
        bits = (self.random.permuted(ok, axis=1) * [1, 2, 4]).sum(1, keepdims=True)
        return np.concatenate((seen, bits), 1).astype(np.float32)


class MaskedLoop(Loop):
    """An environment that fails on forbidden actions."""

    def __init__(self, agent):
        super().__init__(agent)
        self.env = Masking()
        self.obs = self.env.reset()

    def row(self):
        super().row()
        obs, _, decision = self.rows[-1]
        taken = decision.env_action.numpy()
        assert (obs[:, 4].astype(int) >> taken & 1).all()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (distilled_ppo, {}),
        (distilled_ppo, {"normalize_obs": True}),
        (distilled_ppo, {"recurrent__cell": "lstm"}),
        (distilled_dqn, {}),
    ],
)
def test_teachers_never_act_or_teach_forbidden_actions(kind, changes):
    widths = []

    def forbidden_too(obs):
        widths.append(obs.shape[1])
        return stochastic(obs) if len(widths) % 2 else np.zeros(len(obs), np.int64)

    settings = {"teacher__acts": 0.9, "spec": MASKED, **changes}
    agent = student(kind, forbidden_too, action=MASKED.action, total=10_000, **settings)
    MaskedLoop(agent).play(5 * ROWS)
    assert agent.updates > 3
    assert set(widths) == {4}, "the teacher must not see the mask"
    if kind is distilled_ppo:
        rollout = agent._rollout
        MaskedLoop(agent).play(ROWS, learn=False)
        agent._compute_targets()
        obs = rollout.obs.flatten(0, 1)
        teacher_target = rollout.fields["teacher_target"].flatten(0, 1)
        assert not teacher_target[~agent._learner.network.module.masks.allowed(obs)].any()
        assert torch.allclose(teacher_target.sum(1), torch.ones(len(teacher_target)))
        assert not rollout.fields["student_acted"].all()


@pytest.mark.parametrize(("kind", "microbatches"), [("gru", 1), ("lstm", 2)])
def test_recurrent_distillation_equals_a_loop_from_stored_hidden_states(kind, microbatches):
    settings = {"teacher__acts": 0.9, "grad_accumulation": microbatches, **WHOLE}
    agent = student(distilled_ppo, stochastic, total=200, recurrent__cell=kind, **settings)
    loop = Loop(agent)
    loop.play(ROWS)
    loop.play(ROWS, learn=False)
    coef, clip, s = extension(agent).teacher_coef, agent.clip, agent._settings
    rollout, student_acted = agent._rollout, agent._rollout.fields["student_acted"].clone()
    gradient, reference = learned(agent)
    valid = rollout.flags[2]
    assert coef > 0 and 0 < student_acted[valid].float().mean() < 1
    advantage, loss = normal(rollout.advantage, valid & student_acted), 0
    for at, parameters, value in unrolled(loop, reference, kind):
        log_prob, entropy = agent._actor._head.evaluate(parameters, rollout.action[at][None])
        ratio, a = (log_prob[0] - rollout.log_prob[at]).exp(), advantage[at]
        squares = clipped_value_loss(value, rollout.value[at], rollout.return_[at], clip)
        loss = loss + s.value_coef * squares - s.entropy_coef * entropy[0]
        if student_acted[at]:
            loss = loss - torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        teacher_target = torch.from_numpy(stochastic(rollout.obs[at][None].numpy()))
        loss = loss + coef * cross_entropy(agent._actor._head, parameters, teacher_target)[0]
    (loss / valid.sum()).backward()
    theirs = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(gradient, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_student_learns_from_its_teacher(kind):
    settings = {"learning_rate": 1e-2, "teacher__fraction": 1.0, "recurrent__cell": kind}
    agent = student(distilled_ppo, total=3000, **settings)
    found = Loop(agent).play(12 * ROWS)
    first, *_, last = (each["train/teacher_loss"] for each in found)
    assert last < 0.5 * first


def test_invalid_steps_do_not_affect_distillation():
    weights = []
    for broken in (False, True):
        agent = student(distilled_ppo, stochastic, total=10_000, recurrent__cell="lstm", epochs=3)
        Loop(agent).play(ROWS, learn=False)
        if broken:
            ghosts = ~agent._rollout.flags[2]
            assert ghosts.any()
            agent._rollout.obs[ghosts] = 50
            agent._rollout.log_prob[ghosts] = -1e3  # would give an infinite ratio
        agent.update()
        weights.append(agent._learner.network.weights.clone())
    assert torch.isfinite(weights[0]).all()
    assert torch.equal(*weights)
