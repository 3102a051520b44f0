"""The replay against a naive one: same transitions, n-step returns and frame stacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_replay import NaiveReplay
from replay_factory import REPLAY_KINDS, make_replay
from synthetic_envs import EnvConfig, SyntheticEnvs

GAMMA = 0.93


@dataclass(frozen=True)
class Case:
    scene: EnvConfig
    capacity: int
    n_step: int
    prioritized: bool
    kind: str
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    image = draw(st.booleans())
    channels = draw(st.integers(1, 3))
    scene = EnvConfig(
        num_envs=draw(st.integers(1, 8)),
        frame_shape=(channels, 3, 2) if image else (channels,),
        dtype="uint8" if image else "float32",
        frame_stack=draw(st.integers(1, 5)),
        mean_length=draw(st.sampled_from([1.0, 1.5, 3.0, 10.0, 40.0])),
        crash_rate=draw(st.sampled_from([0.0, 0.0, 0.1])),
    )
    return Case(
        scene=scene,
        capacity=draw(st.integers(1, 70)),
        n_step=draw(st.integers(1, 10)),
        prioritized=draw(st.booleans()),
        kind=draw(st.sampled_from(REPLAY_KINDS)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def assert_same(replay, naive: NaiveReplay) -> None:
    """Check that every sampled transition equals the naive replay's."""
    expected = naive.by_id()
    assert len(replay) == len(expected)
    if not expected:
        with pytest.raises(RuntimeError, match="no complete transition"):
            replay.sample(1)
        return
    sampled = set()
    for _ in range(2):
        batch = replay.sample(64)
        index = batch.index.tolist()
        transitions = [expected[i] for i in index]
        sampled.update(index)
        np.testing.assert_array_equal(
            batch.obs.numpy(), [transition.obs for transition in transitions]
        )
        np.testing.assert_array_equal(
            batch.next_obs.numpy(), [transition.next_obs for transition in transitions]
        )
        assert batch.action.tolist() == [transition.action for transition in transitions]
        reward, discount = (
            [transition.reward for transition in transitions],
            [transition.discount for transition in transitions],
        )
        np.testing.assert_allclose(batch.reward.numpy(), reward, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(batch.discount.numpy(), discount, rtol=1e-6)
        assert torch.all((batch.weight > 0) & (batch.weight <= 1))
        if not replay_is_prioritized(replay):
            assert torch.all(batch.weight == 1.0)
    if len(expected) <= 4 and not replay_is_prioritized(replay):
        assert sampled == set(expected)  # 128 samples miss one of four with probability 10^-15


def replay_is_prioritized(replay) -> bool:
    return "priorities" in replay.state_dict()


def ids_with_priority(replay) -> set[int]:
    """Return the ids with a priority."""
    leaves = replay.state_dict()["priorities"]["leaves"]
    return set(torch.nonzero(leaves).flatten().tolist())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(case=cases())
def test_sampled_transitions_equal_a_naive_replays(case: Case) -> None:
    scene = case.scene
    envs = SyntheticEnvs(scene, case.seed)
    replay, layout = make_replay(
        case.kind, scene, case.capacity, case.n_step, GAMMA, case.prioritized, seed=case.seed
    )
    naive = NaiveReplay(scene.num_envs, layout.span, layout.ring_size, case.n_step, GAMMA)
    errors = np.random.default_rng(case.seed)
    first = envs.first()
    replay.start(first)
    naive.start(first)
    assert_same(replay, naive)
    check_every = max(1, layout.ring_size // 3)
    for count, timestep in enumerate(envs.timesteps(4 * layout.ring_size), start=1):
        replay.add(*timestep)
        naive.add(timestep)
        if count == 2 * layout.ring_size:  # a restart without a reset step of the environments
            first = envs.first()
            replay.start(first)
            naive.start(first)
        if count == 3 * layout.ring_size:  # cleared in the middle of episodes
            replay.clear()
            replay.start(envs.observation())
            naive = NaiveReplay(scene.num_envs, layout.span, layout.ring_size, case.n_step, GAMMA)
            naive.row = replay.timestep
            naive.start(envs.observation())
        if count % check_every:
            continue
        assert_same(replay, naive)
        if case.prioritized:
            assert ids_with_priority(replay) == set(naive.by_id())
            if len(replay):
                index = replay.sample(8).index
                replay.update_priorities(index, torch.from_numpy(errors.normal(size=8)))
