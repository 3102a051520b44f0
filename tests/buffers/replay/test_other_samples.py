"""A replay of other samples than n-step transitions: sequences of actions, in a subclass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from synthetic_envs import EnvConfig, SyntheticEnvs

from steadyrl.buffers.replay.host import HostReplay
from steadyrl.buffers.replay.placement import require_room
from steadyrl.buffers.replay.timeline import ENDED, ReplayLayout
from steadyrl.core.errors import MemoryBudgetError

LENGTH, ENVS, CAPACITY = 5, 2, 40
SCENE = EnvConfig(
    num_envs=ENVS, frame_shape=(1,), dtype="float32", frame_stack=1, mean_length=8.0, crash_rate=0.1
)


class Sequences(NamedTuple):
    """B sequences of L actions; the others are padding behind an episode's end."""

    action: torch.Tensor  # [B, L]
    inside: torch.Tensor  # [B, L] bool
    weight: torch.Tensor  # [B]
    index: torch.Tensor  # type: ignore[assignment]  # [B]


@dataclass(frozen=True, kw_only=True)
class SequenceLayout(ReplayLayout):
    length: int

    @property
    def reach(self) -> int:
        return self.length

    @property
    def read_by_one(self) -> str:
        return f"sequence_length={self.length:,}"


class SequenceReplay(HostReplay):
    """Read the actions of up to L timesteps, in NumPy."""

    _layout: SequenceLayout

    def _empty_batch(self, size):
        steps = size, self._layout.length
        return Sequences(
            action=torch.empty(steps, dtype=torch.int64),
            inside=torch.empty(steps, dtype=torch.bool),
            weight=torch.empty(size),
            index=torch.empty(size, dtype=torch.int64),
        )

    def _arguments(self, batch, uniform):
        return tuple(each.numpy() for each in batch)

    def _fill(self, out, beta):
        action, inside, _, index = out.arguments
        self.timeline.draw(out.uniform, index)
        flags, slots = self.timeline.flags.ravel(), self._layout.slots
        going = np.ones(len(index), bool)
        for t in range(self._layout.length):
            slot = (index + t * ENVS) % slots
            inside[:, t], action[:, t] = going, np.where(going, self._action.ravel()[slot], -1)
            going = going & (flags[slot] & ENDED == 0)


def layout() -> SequenceLayout:
    return SequenceLayout(
        capacity=CAPACITY,
        frame_shape=SCENE.frame_shape,
        dtype=SCENE.dtype,
        frame_stack=1,
        num_envs=ENVS,
        n_step=1,
        prioritized=False,
        length=LENGTH,
    )


def test_every_sequence_is_one_of_an_episode() -> None:
    """The action of timestep t in environment e is 2·t + e."""
    replay = SequenceReplay(layout(), alpha=0.6, gamma=0.9, device=torch.device("cpu"), seed=0)
    envs = SyntheticEnvs(SCENE, seed=1)
    replay.start(envs.first())
    episodes: list[list[list[int]]] = [[[]], [[]]]
    drawn: set[int] = set()
    for t, (_, reward, terminated, truncated, valid, obs) in enumerate(envs.timesteps(400)):
        replay.add(2 * t + np.arange(ENVS), reward, terminated, truncated, valid, obs)
        for env in range(ENVS):
            if valid[env]:
                episodes[env][-1].append(2 * t + env)
            if not valid[env] or terminated[env] or truncated[env]:
                episodes[env].append([])
        if t % 7 or not len(replay):
            continue
        wholes = {
            sequence[0]: sequence
            for of_env in episodes
            for episode in of_env
            for i in range(len(episode))
            if (sequence := episode[i : i + LENGTH])
            and (len(sequence) == LENGTH or episode is not of_env[-1])
        }
        batch = replay.sample(64)
        drawn |= {*batch.action[:, 0].tolist()}
        for action, inside in zip(batch.action, batch.inside, strict=True):
            sequence = action[inside].tolist()
            assert sequence == wholes[sequence[0]]
            assert sequence[0] >= 2 * (t - CAPACITY // ENVS - LENGTH)
    assert len(drawn) > 300 and (batch.weight == 1).all()


def test_errors_name_what_one_sequence_reads() -> None:
    wide = replace(layout(), frame_shape=(10**7,), length=10**5)
    with pytest.raises(MemoryBudgetError, match="one transition with sequence_length=100,000"):
        require_room(wide, SequenceReplay.bytes_needed, None)
