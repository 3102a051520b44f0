"""Prioritised replays under test: each is filled, then adds a row, draws a batch, updates it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from buffers.replay import ReplayBuffer, build_replay
from buffers.settings import ReplaySettings

ALPHA, BETA, GAMMA = 0.6, 0.4, 0.99
EPISODE = 200  # rows


class Data(NamedTuple):
    """What all contestants are fed."""

    obs: NDArray[np.float32]  # [rows, size]
    reward: NDArray[np.float32]  # [rows]
    done: NDArray[np.bool_]  # [rows]
    error: NDArray[np.float32]  # [rows] what priorities are made of


def make_data(rows: int, size: int) -> Data:
    """Return random rows with an end every EPISODE rows."""
    random = np.random.default_rng(0)
    done = np.zeros(rows, np.bool_)
    done[EPISODE - 1 :: EPISODE] = True
    return Data(
        random.random((rows, size), np.float32),
        random.random(rows, np.float32),
        done,
        random.exponential(size=rows).astype(np.float32),
    )


Cycle = Callable[[int], Callable[[], None]]  # batch size → one add + sample + update


def build_ours(data: Data, n_step: int) -> ReplayBuffer:
    """Build this program's replay for the data."""
    settings = ReplaySettings(
        capacity=len(data.obs),
        prioritized=True,
        alpha=ALPHA,
        beta_start=BETA,
        beta_end=1.0,
        device="cpu",
    )
    return build_replay(
        settings,
        frame_shape=data.obs.shape[1:],
        dtype="float32",
        frame_stack=1,
        num_envs=1,
        n_step=n_step,
        gamma=GAMMA,
        device=torch.device("cpu"),
        seed=0,
    )


def ours(data: Data, n_step: int) -> Cycle:
    """Return cycles of this program's replay; ended rows are followed by one that resets."""
    replay = build_ours(data, n_step)
    no, yes, action = np.zeros(1, np.bool_), np.ones(1, np.bool_), np.zeros(1, np.int64)
    done = data.done.tolist()
    replay.start(data.obs[:1])
    row = 0
    resets = False

    def add() -> None:
        nonlocal row, resets
        ends = done[row] and not resets
        here = slice(row, row + 1)
        terminated, valid = yes if ends else no, no if resets else yes
        replay.add(action, data.reward[here], terminated, no, valid, data.obs[here])
        resets = ends
        row = (row + 1) % len(done)

    while len(replay) < len(data.obs) * (EPISODE - 2) // EPISODE:
        add()
    errors = torch.from_numpy(data.error)
    for ids in torch.arange(len(data.obs)).split(4096):
        replay.update_priorities(ids, errors[ids])

    def cycle(batch_size: int) -> Callable[[], None]:
        error = errors[:batch_size].clone()

        def once() -> None:
            add()
            batch = replay.sample(batch_size, beta=BETA)
            replay.update_priorities(batch.index, error)

        return once

    return cycle


def cpprb(data: Data) -> Cycle:
    """Return cycles of cpprb's prioritised buffer (1-step, its default)."""
    from cpprb import PrioritizedReplayBuffer

    size, rows = data.obs.shape[1], len(data.obs)
    plain: dict[str, Any] = {"rew": {}, "done": {}, "act": {"dtype": np.int64}}
    fields = {"obs": {"shape": size}, "next_obs": {"shape": size}, **plain}
    replay = PrioritizedReplayBuffer(rows, fields, alpha=ALPHA)
    replay.add(
        obs=data.obs,
        next_obs=data.obs,
        rew=data.reward,
        done=data.done,
        act=np.zeros(rows, np.int64),
    )
    replay.update_priorities(np.arange(rows), data.error)
    row = 0

    def cycle(batch_size: int) -> Callable[[], None]:
        error = data.error[:batch_size].copy()

        def once() -> None:
            nonlocal row
            row = (row + 1) % rows
            obs = data.obs[row]
            replay.add(obs=obs, next_obs=obs, rew=data.reward[row], done=data.done[row], act=0)
            batch = replay.sample(batch_size, beta=BETA)
            replay.update_priorities(batch["indexes"], error)

        return once

    return cycle


def tianshou(data: Data) -> Cycle:
    """Return cycles of Tianshou's prioritised buffer (1-step; its n-step is in the algorithm)."""
    from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

    rows = len(data.obs)
    replay = PrioritizedReplayBuffer(rows, alpha=ALPHA, beta=BETA)
    filled = ReplayBuffer.from_data(
        data.obs,
        np.zeros(rows, np.int64),
        data.reward,
        data.done,
        np.zeros(rows, np.bool_),
        data.done,
        data.obs,
    )
    replay.update(filled)
    replay.update_weight(np.arange(rows), data.error)
    row = 0

    def cycle(batch_size: int) -> Callable[[], None]:
        error = data.error[:batch_size].copy()

        def once() -> None:
            nonlocal row
            row = (row + 1) % rows
            obs, done = data.obs[row], bool(data.done[row])
            step: Any = Batch(
                obs=obs,
                act=0,
                rew=data.reward[row],
                terminated=done,
                truncated=False,
                obs_next=obs,
                info={},
            )
            replay.add(step)
            _, index = replay.sample(batch_size)
            replay.update_weight(index, error)

        return once

    return cycle
