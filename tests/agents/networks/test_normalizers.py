"""Running statistics equal those of all samples at once, whatever the chunks."""

import numpy as np
import torch
from forked_ranks import together
from torch.utils._python_dispatch import TorchDispatchMode

from steadyrl.agents.learner.reward_normaliser import RewardNormaliser
from steadyrl.agents.networks.normalizers import CLIP, ObservationNormaliser
from tests.agents.ppo.test_memory import Storages

WIDE, PIECE = 3000, 8


def seen_by(rank):
    samples = np.random.default_rng(rank).normal(rank, 1 + rank, (100 - 70 * rank, WIDE))
    return torch.from_numpy(samples.astype(np.float32))


def taken_in(comm):
    """Return the statistics of both ranks' samples, and the peak bytes of computing them."""
    normaliser, obs = ObservationNormaliser((WIDE,)), seen_by(comm.rank)
    normaliser.comm = comm
    with Storages() as made:
        for part in torch.arange(len(obs)).split(len(obs) // 2):
            pieces = part.split(PIECE)
            normaliser.update_chunked(lambda pieces=pieces: (obs[piece] for piece in pieces))
    return *(part.numpy().copy() for part in normaliser._statistics()), made.peak


def test_ranks_update_statistics_in_chunks():
    samples = np.concatenate([seen_by(rank).double().numpy() for rank in (0, 1)])
    for count, mean, square, peak in together(2, taken_in):
        assert count == len(samples)
        np.testing.assert_allclose(mean, samples.mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(square, ((samples - samples.mean(0)) ** 2).sum(0), rtol=1e-12)
        assert peak < 8 * WIDE * (3 * PIECE + 20), "one chunk, and sums"


def test_chunked_statistics_equal_those_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(1000, 3, generator=generator) * torch.tensor([1.0, 10.0, 0.1]) + 5
    normaliser = ObservationNormaliser((3,))
    for chunk in samples.split([1, 99, 400, 500]):
        normaliser.update(chunk)
    out = normaliser(samples)
    expected = (samples - samples.mean(0)) / samples.std(0, correction=0)
    torch.testing.assert_close(out, expected.clamp(-CLIP, CLIP), atol=1e-5, rtol=1e-5)
    assert normaliser.count == 1000


def test_statistics_are_accurate_at_a_large_offset():
    samples = torch.randn(5000, 1, generator=torch.Generator().manual_seed(0)).double() + 1e6
    normaliser = ObservationNormaliser((1,))
    for chunk in samples.split(50):
        normaliser.update(chunk)
    truth = samples.std(0, correction=0).float()
    torch.testing.assert_close(1 / normaliser.inv_std, truth, rtol=1e-6, atol=0)


def test_the_normaliser_is_the_identity_before_any_data():
    samples = torch.tensor([[3.0, -4.0]])
    assert torch.equal(ObservationNormaliser((2,))(samples), samples)


def test_a_constant_input_stays_finite():
    normaliser = ObservationNormaliser((2,))
    normaliser.update(torch.ones(10, 2))
    assert torch.equal(normaliser(torch.tensor([[1.0, 1.5]])), torch.tensor([[0.0, 0.5]]))


def test_rewards_are_divided_by_the_std_of_the_discounted_return():
    rng = np.random.default_rng(0)
    reward = rng.normal(2, 3, size=(200, 4)).astype(np.float32)
    valid = rng.random((200, 4)) > 0.1
    normaliser = RewardNormaliser(4, 0.9)
    returns, running = [], np.zeros(4)
    for r, v in zip(reward, valid, strict=True):
        normaliser.add(r, v)
        running = np.where(v, 0.9 * running + r, 0.0)
        returns += list(running[v])
    np.testing.assert_allclose(normaliser.scale, 1 / np.std(returns), rtol=1e-10)


def test_rewards_of_invalid_steps_are_ignored():
    one, other = RewardNormaliser(2, 0.9), RewardNormaliser(2, 0.9)
    valid = np.array([True, False])
    for k in range(5):
        one.add(np.array([k, 0], dtype=np.float32), valid)
        other.add(np.array([k, 1e9], dtype=np.float32), valid)
    assert one.scale == other.scale


def test_rewards_are_unscaled_until_they_vary():
    normaliser = RewardNormaliser(1, 0.9)
    assert normaliser.scale == 1
    normaliser.add(np.zeros(1, dtype=np.float32), np.array([False]))
    assert normaliser.scale == 1


def test_reward_statistics_are_restored():
    one, other = RewardNormaliser(2, 0.9), RewardNormaliser(2, 0.9)
    for k in range(5):
        one.add(np.array([k, -k], dtype=np.float32), np.array([True, True]))
    other.load_state_dict(one.state_dict())
    for n in (one, other):
        n.add(np.array([7, 8], dtype=np.float32), np.array([True, True]))
    assert one.scale == other.scale


class NoLooking(TorchDispatchMode):
    """Fail if a number is read from the device: updates must not synchronise."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func)
        return func(*args, **(kwargs or {}))


def test_updating_statistics_never_synchronises():
    normaliser = ObservationNormaliser((2,))
    with NoLooking():
        normaliser.preview(torch.ones(3, 2))
        normaliser.update(torch.arange(6.0).view(3, 2))
        normaliser.set_identity_()
        normaliser.freeze_()
    assert normaliser.count == 3
    torch.testing.assert_close(normaliser(torch.tensor([[2.0, 3.0]])), torch.zeros(1, 2))


def test_preview_counts_nothing():
    normaliser = ObservationNormaliser((1,))
    normaliser.update(torch.tensor([[0.0], [2.0]]))
    before = {name: tensor.clone() for name, tensor in normaliser.named_buffers()}
    normaliser.preview(torch.tensor([[4.0]]))
    assert normaliser.frozen_mean.item() == 2
    normaliser.freeze_()
    assert all(torch.equal(t, before[name]) for name, t in normaliser.named_buffers())
    normaliser.update(torch.empty(0, 1))
    assert normaliser.count == 2
