"""Teachers learn the same wherever they stand among the extensions of an agent."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from changed import changed
from ppo_agents import CPU, SETTINGS, SPACES

from steadyrl.agents.distillation.extension import PPOTeacher
from steadyrl.agents.distillation.teacher import ObjectTeacher
from steadyrl.agents.extension import Extension
from steadyrl.agents.ppo.agent import PPO
from steadyrl.agents.registry import EXTENSIONS, build_agent
from steadyrl.envs.types import EnvSpec
from tests.agents.distillation.test_masks_and_recurrence import stochastic
from tests.agents.dqn.test_agent import run
from tests.agents.dqn.test_augmentation import SHIFTED, SPEC, Pictures
from tests.agents.ppo.test_recurrent import ROWS, Loop


def brighter(obs):
    """Teach which half of a picture is the brighter one."""
    left, right = obs[:, 0, :, :2].sum((1, 2)), obs[:, 0, :, 3:].sum((1, 2))
    return (left < right).astype(np.int64)


def test_dqn_with_a_teacher_and_shifted_images_learns_the_same_in_both_orders(monkeypatch):
    weights, orders = [], []
    for entries in (list(EXTENSIONS.items()), list(reversed(EXTENSIONS.items()))):
        monkeypatch.setattr("steadyrl.agents.registry.EXTENSIONS", dict(entries))
        settings = changed(SHIFTED, teacher__policy="t")
        teacher = ObjectTeacher("t", SPEC.action, brighter)
        agent = build_agent(settings, SPEC, device=CPU, seed=0, total_steps=400, teacher=teacher)
        orders.append([type(each).__name__ for each in agent._extensions])
        before = agent._learner.network.weights.clone()
        run(agent, Pictures(2, [5], terminates=True), 60)
        assert agent.updates > 5 and not torch.equal(agent._learner.network.weights, before)
        weights.append(agent._learner.network.weights)
    assert orders[0] == orders[1][::-1] == ["DQNTeacher", "RandomShift"]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


class Wrapping(Extension):
    """Wrap the loss without changing it."""

    def loss_spec(self, spec):
        def same(*inputs, loss, **options):
            return loss(*inputs, **options)

        return replace(spec, loss=partial(same, loss=spec.loss))


@pytest.mark.parametrize("cell", ["none", "gru"])
@pytest.mark.parametrize("acts", [0.0, 1.0])
def test_a_ppo_teacher_learns_the_same_behind_a_loss_that_is_wrapped(cell, acts):
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES["discrete"])
    changes = {"teacher__policy": "t", "teacher__acts": acts, "recurrent__cell": cell}
    settings, how = changed(SETTINGS, **changes), {"device": CPU, "seed": 0, "total_steps": 640}
    weights = []
    for before in ((), (Wrapping(),)):
        teacher = ObjectTeacher("t", spec.action, stochastic)
        extension = PPOTeacher(settings, spec, teacher=teacher, **how)
        agent = PPO(settings, spec, extensions=[*before, extension], **how)
        Loop(agent).play(6 * ROWS)
        assert agent.updates > 5
        weights.append(agent._learner.network.weights)
    assert torch.equal(*weights)
