"""Where DQN's samples come from and its priorities go: one replay, or those of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from steadyrl.agents.learner.comm import Comm
from steadyrl.buffers.replay.buffer import ReplayBatch, ReplayBuffer


class Sampler(NamedTuple):
    """How DQN samples."""

    can_sample: Callable[[], bool]
    sample: Callable[..., ReplayBatch]  # by the exponent `beta` of importance weights
    update_priorities: Callable[[Tensor, Tensor], None]  # of the samples' indices and TD errors


def local_sampler(replay: ReplayBuffer, batch_size: int, *, prioritized: bool) -> Sampler:
    """Return a sampler of this process's replay; without priorities all weights are 1."""
    return Sampler(
        can_sample=lambda: replay.timeline.count > 0,
        sample=lambda *, beta: replay.sample(batch_size, beta=beta if prioritized else 1.0),
        update_priorities=lambda index, td_error: replay.update_priorities(index, td_error),
    )


def sampler_of_ranks(
    replay: ReplayBuffer, batch_size: int, comm: Comm, *, prioritized: bool = False
) -> Sampler:
    """Return a sampler of this rank's part of a batch of all ranks; its functions are collective.

    No rank samples while another has nothing to sample.
    """

    def can_sample() -> bool:
        (some_have_nothing,) = comm.all_reduce_max(replay.timeline.count == 0)
        return not some_have_nothing

    local = local_sampler(replay, batch_size, prioritized=prioritized)
    return local._replace(can_sample=can_sample)


def prioritized_sampler_of_ranks(replay: ReplayBuffer, batch_size: int, comm: Comm) -> Sampler:
    """Return the same for prioritised replays.

    Importance weights are relative to the smallest probability, and new transitions have the
    largest priority, of all ranks.
    """
    plain = sampler_of_ranks(replay, batch_size, comm, prioritized=True)

    def sample(*, beta: float) -> ReplayBatch:
        batch = plain.sample(beta=beta)
        (most,) = comm.all_reduce_max(1 / replay.min_probability)
        batch.weight.mul_((replay.min_probability * most) ** -beta)
        return batch

    def update_priorities(index: Tensor, td_error: Tensor) -> None:
        replay.update_priorities(index, td_error)
        (replay.max_priority,) = comm.all_reduce_max(replay.max_priority)

    return plain._replace(sample=sample, update_priorities=update_priorities)
