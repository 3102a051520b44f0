"""Random shifts are DrQ's: padding by replication and a random crop, new ones at each update."""

from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from changed import changed
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrl.agents.dqn.augmentation import PAD, RandomShift, shift
from steadyrl.agents.dqn.build import build_loss_spec, init_network
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.registry import build_agent
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import DiscreteActions, EnvSpec
from tests.agents.dqn.test_agent import CPU, SETTINGS, Chain, run

SIDES = (7, 5)
SPEC = EnvSpec("Pictures", 2, (2, *SIDES), "uint8", 1, DiscreteActions(2))
SHIFTED = replace(
    SETTINGS, augmentation="shift", learning_starts=20, n_step=2, max_grad_norm=0.5, batch_size=6
)


class Pictures(Chain):
    """The time as one random picture each."""

    def _obs(self):
        pictures = np.random.default_rng(5).integers(0, 256, (self.size, 2, *SIDES), np.uint8)
        return pictures[self.at]


def agent_of(seed=0, **changes):
    chosen = changed(SHIFTED, **changes)
    return build_agent(chosen, SPEC, device=CPU, seed=seed, total_steps=1000)


def naive_shift(images, offsets):
    """Pad each image by repeating its border, and crop it."""
    padded = F.pad(images.double(), (PAD,) * 4, mode="replicate").to(images.dtype)
    height, width = images.shape[2:]
    crops = [
        picture[:, PAD + down : PAD + down + height, PAD + right : PAD + right + width]
        for picture, (down, right) in zip(padded, offsets.tolist(), strict=True)
    ]
    return torch.stack(crops)


MASKED = EnvSpec("Masked", 2, (1, SIDES[0] + 1, SIDES[1]), "uint8", 2, DiscreteActions(7), mask=1)


def test_masks_behind_images_are_not_shifted():
    """The loss gets the shifted pictures, and the masks of the samples as they were."""
    g = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (2, 64, 2, *SIDES), generator=g).to(torch.uint8)
    rows = torch.zeros(2, 64, 2, 1, SIDES[1], dtype=torch.uint8)
    rows[..., 0] = torch.randint(1, 128, (2, 64, 2, 1), generator=g)
    obs, next_obs = torch.cat((pictures, rows), 3)
    kind = namedtuple("Sample", "obs next_obs shift")
    extension = RandomShift(SHIFTED, MASKED, device=CPU, seed=0, total_steps=10)
    offsets = torch.randint(-PAD, PAD + 1, (64, 2, 2), generator=g)
    spec = extension.loss_spec(replace(build_loss_spec(SHIFTED), loss=lambda *given: given[2]))
    seen = spec.loss(None, None, kind(obs, next_obs, offsets))
    for part, picture, row, way in zip(
        (seen.obs, seen.next_obs), pictures, rows, offsets.unbind(1), strict=True
    ):
        assert torch.equal(part, torch.cat((naive_shift(picture, way), row), 2))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.data())
def test_a_shift_is_a_crop_of_the_padded_image(batch, channels, height, width, data):
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    images = torch.randint(0, 256, (batch, channels, height, width), generator=g).to(torch.uint8)
    offsets = torch.randint(-PAD, PAD + 1, (batch, 2), generator=g)
    assert torch.equal(shift(images, offsets), naive_shift(images, offsets))


def learned(agent, updates):
    """Let an agent learn; return each update's batch, with the weights before and after."""
    found, step = [], agent._learner.step

    def record(batch, rate, *scalars):
        before = agent._learner.network.weights.detach().clone()
        result = step(batch, rate, *scalars)
        after = agent._learner.network.weights.detach().clone()
        batch = type(batch)(*(part.clone() for part in batch))
        found.append((batch, rate, before, after, agent._target.weights.clone()))
        return result

    agent._learner.step = record
    run(agent, Pictures(2, [4, 9], True), 20 + 2 * updates)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"grad_accumulation": 2},
        {"munchausen__enabled": True},
        pytest.param({"compile": "true"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_updates_learn_from_shifted_samples(changes):
    found = learned(agent_of(**changes), 30)
    assert len(found) >= 30
    one = None
    for batch, rate, before, after, target_weights in found:
        if one is None:
            online, target = (init_network(SHIFTED, SPEC, CPU, seed=0) for _ in range(2))
            plain = changed(
                SHIFTED, compile="false", **{k: v for k, v in changes.items() if k != "compile"}
            )
            one = Learner(build_loss_spec(plain), online, "direct", frozen=(target,))
            online.weights.copy_(before)
        target.weights.copy_(target_weights)
        now, then = batch.shift.unbind(1)
        sample = type(batch)(*batch)._replace(
            obs=naive_shift(batch.obs, now), next_obs=naive_shift(batch.next_obs, then)
        )
        one.step(sample, rate)
        torch.testing.assert_close(one.network.weights, after, rtol=0, atol=1e-5)
    offsets = torch.stack([batch.shift for batch, *_ in found]).flatten(0, 1)  # [U·B, 2, 2]
    assert set(offsets.unique().tolist()) == set(range(-PAD, PAD + 1))
    for one_way, other in ((0, 1), (2, 3)):  # observation and next observation, rows and columns
        flat = offsets.flatten(1)
        assert not torch.equal(flat[:, one_way], flat[:, other])


def test_shifts_are_uniform_and_depend_on_the_update_alone():
    extension = RandomShift(SHIFTED, SPEC, device=CPU, seed=3, total_steps=10)
    again = RandomShift(SHIFTED, SPEC, device=CPU, seed=3, total_steps=10)
    other = RandomShift(SHIFTED, SPEC, device=CPU, seed=4, total_steps=10)
    agent = agent_of()
    for each in (extension, again, other):
        each.attach(type("Parts", (), {"learner": agent._learner}))
    batch = type("Batch", (), {"obs": torch.zeros(4_050, 2, *SIDES)})
    drawn = {}
    for update in (0, 1):
        agent._learner.updates = update
        first, same, different = (
            e.replay_fields(batch)["shift"] for e in (extension, again, other)
        )
        assert torch.equal(first, same) and torch.equal(
            first, extension.replay_fields(batch)["shift"]
        )
        assert not torch.equal(first, different)
        drawn[update] = first
    assert not torch.equal(drawn[0], drawn[1])
    both = torch.stack([*drawn.values()]).flatten(0, 1) + PAD
    for pair in (both[:, 0], both[:, 1], both[:, :, 0], both[:, :, 1]):  # each with each: 81 cells
        counts = torch.bincount(pair[:, 0] * 9 + pair[:, 1], minlength=81)
        chi_squared = ((counts - 100.0) ** 2 / 100).sum()
        assert chi_squared < 130  # 80 degrees of freedom: p = 0.0004


def test_resuming_is_bitwise_exact():
    def weights(stop):
        agent, env = agent_of(), Pictures(2, [4, 9], True)
        run(agent, env, 60)
        if stop:
            state, agent = agent.state_dict(), agent_of(seed=0)
            agent.load_state_dict(state)
        run(agent, env, 60)
        return agent.updates, agent._learner.network.weights.detach().clone()

    (updates, whole), (same, resumed) = weights(False), weights(True)
    assert updates == same > 20 and torch.equal(whole, resumed)


@pytest.mark.parametrize("shape", [(4,), (3, 5)])
def test_shifts_need_images(shape):
    spec = EnvSpec("Some-v1", 1, shape, "float32", 1, DiscreteActions(2))
    with pytest.raises(SettingError, match=r"augmentation=shift: needs images, but Some-v1"):
        SHIFTED.validate_fit(spec, 1000)
    replace(SHIFTED, augmentation="none").validate_fit(spec, 1000)
