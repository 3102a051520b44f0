"""The rollout: advantages against brute force, minibatches, constant memory, misuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrl.agents.ppo.minibatches import index_batches
from steadyrl.buffers.rollout.buffer import RolloutBatch, RolloutBuffer
from steadyrl.buffers.rollout.gae import gae_host, gae_torch
from steadyrl.core.errors import MemoryBudgetError

GAMMA, LAMBDA = 0.97, 0.9
CPU = torch.device("cpu")


def make(steps: int, envs: int, size: int = 2) -> RolloutBuffer:
    return RolloutBuffer(
        steps=steps,
        num_envs=envs,
        observation_shape=(size,),
        observation_dtype=torch.float32,
        action_shape=(),
        action_dtype=torch.int64,
        device=CPU,
    )


def random_timesteps(seed: int, steps: int, envs: int) -> dict[str, np.ndarray]:
    """Random rewards, values and flags; an episode's end is followed by an invalid timestep."""
    random = np.random.default_rng(seed)
    timesteps = {
        "reward": random.normal(size=(steps, envs)).astype(np.float32),
        "value": random.normal(size=(steps + 1, envs)).astype(np.float32),
        "terminated": random.random((steps, envs)) < 0.2,
        "truncated": random.random((steps, envs)) < 0.2,
        "valid": random.random((steps, envs)) > 0.1,
    }
    for t in range(steps):
        if t:
            ended = timesteps["terminated"][t - 1] | timesteps["truncated"][t - 1]
            timesteps["valid"][t] &= ~ended
        timesteps["terminated"][t] &= timesteps["valid"][t]
        timesteps["truncated"][t] &= timesteps["valid"][t]
    return timesteps


def brute_force(timesteps: dict[str, np.ndarray]) -> np.ndarray:
    """A_t = Σ_k (γλ)^k δ_{t+k}, summed forward until the episode ends."""
    steps, envs = timesteps["reward"].shape
    advantage = np.zeros((steps, envs))
    for env in range(envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                bootstrap = 0.0 if timesteps["terminated"][k, env] else GAMMA
                following = float(timesteps["value"][k + 1, env])
                delta = float(timesteps["reward"][k, env]) + bootstrap * following
                advantage[t, env] += weight * (delta - float(timesteps["value"][k, env]))
                weight *= GAMMA * LAMBDA
                cut = k + 1 < steps and not timesteps["valid"][k + 1, env]
                if timesteps["terminated"][k, env] or timesteps["truncated"][k, env] or cut:
                    break
    return advantage


def fill(rollout: RolloutBuffer, timesteps: dict[str, np.ndarray]) -> None:
    """Add timesteps whose observation, action and log-probability equal the sample's index."""
    steps, envs = timesteps["reward"].shape
    for t in range(steps):
        name = torch.arange(envs) + t * envs
        rollout.add(
            name[:, None].float().expand(envs, 2),
            name,
            -name.float(),
            torch.from_numpy(timesteps["value"][t]),
            timesteps["reward"][t],
            timesteps["terminated"][t],
            timesteps["truncated"][t],
            timesteps["valid"][t],
        )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 20), envs=st.integers(1, 4))
def test_gae_on_host_and_in_torch_equals_brute_force(seed, steps, envs):
    timesteps = random_timesteps(seed, steps, envs)
    expected = brute_force(timesteps)
    flags = np.stack([timesteps[name] for name in ("terminated", "truncated", "valid")])
    host = np.zeros((steps, envs), np.float32)
    gae_host(timesteps["reward"], timesteps["value"], flags, GAMMA, LAMBDA, host)
    on_device = torch.zeros(steps, envs)
    tensors = (torch.from_numpy(part) for part in (timesteps["reward"], timesteps["value"], flags))
    gae_torch(*tensors, GAMMA, LAMBDA, on_device)
    learned = timesteps["valid"]
    np.testing.assert_allclose(host[learned], expected[learned], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(on_device.numpy(), host, rtol=1e-6, atol=1e-7)


def test_advantages_do_not_leak_across_episode_ends_or_crashes():
    timesteps = random_timesteps(3, 12, 3)
    timesteps["terminated"][:], timesteps["truncated"][:], timesteps["valid"][:] = (
        False,
        False,
        True,
    )
    timesteps["terminated"][4, 0], timesteps["truncated"][4, 1] = True, True
    timesteps["valid"][5] = False  # environment 2 crashed: its episode is cut at timestep 4
    changed = {name: part.copy() for name, part in timesteps.items()}
    changed["reward"][5:] += 100.0
    changed["value"][6:] -= 50.0
    advantages = []
    for some in (timesteps, changed):
        rollout = make(12, 3)
        fill(rollout, some)
        last_value = torch.from_numpy(some["value"][-1])
        rollout.compute_advantages(last_value, gamma=GAMMA, gae_lambda=LAMBDA)
        advantages.append(rollout.advantage[:5].clone())
    assert torch.equal(advantages[0], advantages[1])


def test_time_limits_bootstrap_and_terminations_do_not():
    rollout = make(1, 2)
    ends = np.array([True, False]), np.array([True, True])  # terminated, truncated
    zeros = torch.zeros(2)
    valid = np.ones(2, np.bool_)
    rollout.add(torch.zeros(2, 2), zeros.long(), zeros, zeros, np.ones(2), *ends, valid)
    rollout.compute_advantages(torch.full((2,), 10.0), gamma=0.9, gae_lambda=LAMBDA)
    assert rollout.return_.flatten().tolist() == [1.0, 10.0]


def any_rollout(test):
    """Run a test with full rollouts of any size and number of minibatches."""
    given_ = given(
        seed=st.integers(0, 2**32 - 1),
        steps=st.integers(1, 15),
        envs=st.integers(1, 4),
        count=st.integers(1, 9),
    )
    return settings(max_examples=40, deadline=None, derandomize=True)(given_(test))


def finished(seed, steps, envs):
    """Return random timesteps, and a rollout of them with advantages."""
    timesteps = random_timesteps(seed, steps, envs)
    rollout = make(steps, envs)
    fill(rollout, timesteps)
    rollout.compute_advantages(
        torch.from_numpy(timesteps["value"][-1]), gamma=GAMMA, gae_lambda=LAMBDA
    )
    return timesteps, rollout


@any_rollout
def test_minibatches_cover_valid_samples_once_in_new_order(seed, steps, envs, count):
    timesteps, rollout = finished(seed, steps, envs)
    expected = np.flatnonzero(timesteps["valid"]).tolist()
    generator = torch.Generator().manual_seed(seed)
    orders = []
    for _ in range(2):
        batches = list(rollout.minibatches(count, generator))
        sizes = [len(batch.action) for batch in batches]
        assert len(batches) == min(count, len(expected))
        assert not sizes or max(sizes) - min(sizes) <= 1
        order = [row for batch in batches for row in batch.action.tolist()]
        orders.append(order)
        assert sorted(order) == expected
        for batch in batches:
            names = batch.action
            assert torch.equal(batch.obs, names[:, None].float().expand(-1, 2))
            assert torch.equal(batch.log_prob, -names.float())
            for part, whole in (
                (batch.value, rollout.value[:-1]),
                (batch.advantage, rollout.advantage),
                (batch.return_, rollout.return_),
            ):
                assert torch.equal(part, whole.flatten()[names])
            assert torch.equal(batch.return_, batch.advantage + batch.value)
    if len(expected) > 20:
        assert orders[0] != orders[1]


def test_minibatches_written_into_buffers_equal_copied_ones():
    rollout = make(6, 3)
    fill(rollout, random_timesteps(3, 6, 3))
    rollout.compute_advantages(torch.zeros(3), gamma=GAMMA, gae_lambda=LAMBDA)
    buffers: dict[int, RolloutBatch] = {}

    def buffer_for(like: RolloutBatch, timesteps: int) -> RolloutBatch:
        parts = (part.new_empty((timesteps, *part.shape[1:])) for part in like)
        return buffers.setdefault(timesteps, RolloutBatch(*parts))

    copied = rollout.minibatches(4, torch.Generator().manual_seed(1))
    written = rollout.minibatches(4, torch.Generator().manual_seed(1), buffer_for)
    for one, other in zip(copied, written, strict=True):
        assert other is buffers[len(one.obs)]
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@any_rollout
def test_index_batches_equal_minibatches_padded_at_weight_0(seed, steps, envs, count):
    _, rollout = finished(seed, steps, envs)
    one, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    batches = [batch for _ in range(3) for batch in rollout.minibatches(count, one)]
    orders = (rollout.shuffled(other) for _ in range(3))
    size, flat = max((len(batch.obs) for batch in batches), default=1) + 1, rollout.flat()
    for batch, ((index, *tensors), weight) in zip(
        batches, index_batches(flat, orders, count, size), strict=True
    ):
        assert all(part is tensor for part, tensor in zip(tensors, flat, strict=True))
        n = len(batch.obs)
        for part, tensor in zip(batch, tensors, strict=True):
            assert torch.equal(tensor[index[:n]], part)
            assert torch.equal(tensor[index[n:]], part[:1].expand_as(tensor[index[n:]]))
        torch.testing.assert_close(weight[:n], torch.full((n,), 1 / n))
        assert not weight[n:].any()


def test_rollout_memory_is_allocated_once():
    rollout = make(16, 2)
    timesteps = random_timesteps(0, 16, 2)
    names = ("obs", "action", "log_prob", "value", "advantage", "return_", "reward")
    before = [getattr(rollout, name).data_ptr() for name in names]
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        fill(rollout, timesteps)
        rollout.compute_advantages(torch.zeros(2), gamma=GAMMA, gae_lambda=LAMBDA)
        for _ in rollout.minibatches(4, generator):
            pass
        rollout.clear()
    assert [getattr(rollout, name).data_ptr() for name in names] == before


@pytest.mark.parametrize("argument", range(4))
def test_tensors_that_require_gradients_are_rejected(argument):
    rollout = make(1, 1)
    parts = [torch.ones(1, 2), torch.zeros(1), torch.ones(1), torch.ones(1)]
    parts[argument].requires_grad_(True)
    flag = np.zeros(1, np.bool_)
    with pytest.raises(ValueError, match="inference_mode"):
        rollout.add(*parts, np.ones(1), flag, flag, ~flag)


def test_misuse_raises_clear_errors():
    rollout = make(2, 1)
    timesteps = random_timesteps(0, 2, 1)
    with pytest.raises(RuntimeError, match="0 of 2 timesteps"):
        rollout.compute_advantages(torch.zeros(1), gamma=GAMMA, gae_lambda=LAMBDA)
    fill(rollout, timesteps)
    assert rollout.full
    with pytest.raises(RuntimeError, match=r"call compute_advantages\(\)"):
        next(rollout.minibatches(1, torch.Generator()))
    with pytest.raises(RuntimeError, match="all 2 timesteps"):
        fill(rollout, timesteps)
    rollout.clear()
    assert not rollout.full


def test_a_restored_rollout_continues_the_same():
    timesteps = random_timesteps(5, 8, 2)
    first = {name: part[:3] for name, part in timesteps.items()}
    rest = {name: part[3:] for name, part in timesteps.items()}
    whole, half, other = make(8, 2), make(8, 2), make(8, 2)
    fill(whole, timesteps)
    fill(half, first)
    other.load_state_dict(half.state_dict())
    fill(other, rest)
    for rollout in (whole, other):
        rollout.compute_advantages(
            torch.from_numpy(timesteps["value"][-1]), gamma=GAMMA, gae_lambda=LAMBDA
        )
    assert torch.equal(whole.advantage, other.advantage)
    assert torch.equal(whole.obs[:3], other.obs[:3])
    with pytest.raises(ValueError, match="do not fit"):
        make(8, 2, size=3).load_state_dict(half.state_dict())


def test_a_saved_rollout_without_one_of_its_parts_is_refused():
    state = make(8, 2).state_dict()
    for key in state:
        with pytest.raises(ValueError, match=f"has no {key}"):
            make(8, 2).load_state_dict({name: state[name] for name in state if name != key})


def test_a_rollout_beyond_memory_is_rejected_before_allocation():
    with pytest.raises(MemoryBudgetError, match="rollout needs"):
        make(10**9, 1000, size=10**6)


def test_nbytes_counts_every_tensor_and_release_frees_them():
    rollout = make(4, 3)
    held = [part for part in vars(rollout).values() if isinstance(part, torch.Tensor)]
    assert rollout.nbytes == sum(part.nbytes for part in held)
    rollout.release()
    assert not [part for part in vars(rollout).values() if isinstance(part, torch.Tensor)]
