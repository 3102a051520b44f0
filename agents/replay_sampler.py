"""Where samples come from and priorities go: one replay, or those of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from steadyrl.agents.learner.comm import Comm
from steadyrl.buffers.replay.buffer import ReplayBatch, ReplayBuffer
from steadyrl.buffers.replay.settings import ReplaySettings


class Sampler(NamedTuple):
    """Samples from the replay of one process or of all ranks, and where their priorities go."""

    can_sample: Callable[[], bool]
    sample: Callable[..., ReplayBatch]  # by the exponent `beta` of importance weights
    update_priorities: Callable[[Tensor, Tensor], None]  # of the samples' indices and TD errors


def local_sampler(replay: ReplayBuffer, settings: ReplaySettings, batch_size: int) -> Sampler:
    """Return a sampler of this process's replay; without priorities all weights are 1."""
    sampler = _sampler_of_one(replay, settings, batch_size)
    return _relative_to_batch(sampler) if _normalizes_by_batch(settings) else sampler


def sampler_of_ranks(
    replay: ReplayBuffer, settings: ReplaySettings, batch_size: int, comm: Comm
) -> Sampler:
    """Return a sampler of this rank's part of a batch of all ranks; its functions are collective.

    No rank samples while another has nothing to sample.
    """

    def can_sample() -> bool:
        (some_have_nothing,) = comm.all_reduce_max(replay.timeline.count == 0)
        return not some_have_nothing

    sampler = _sampler_of_one(replay, settings, batch_size)._replace(can_sample=can_sample)
    if not settings.prioritized:
        return sampler
    sampler = _with_priorities_of_ranks(sampler, replay, comm)
    return _relative_to_batch(sampler, comm) if _normalizes_by_batch(settings) else sampler


def _sampler_of_one(replay: ReplayBuffer, settings: ReplaySettings, batch_size: int) -> Sampler:
    prioritized = settings.prioritized
    return Sampler(
        can_sample=lambda: replay.timeline.count > 0,
        sample=lambda *, beta: replay.sample(batch_size, beta=beta if prioritized else 1.0),
        update_priorities=lambda index, td_error: replay.update_priorities(index, td_error),
    )


def _with_priorities_of_ranks(sampler: Sampler, replay: ReplayBuffer, comm: Comm) -> Sampler:
    """Make importance weights relative to the smallest probability of all ranks' transitions.

    New transitions have the largest priority of all ranks.
    """

    def sample(*, beta: float) -> ReplayBatch:
        batch = sampler.sample(beta=beta)
        (most,) = comm.all_reduce_max(1 / replay.min_probability)
        batch.weight.mul_((replay.min_probability * most) ** -beta)
        return batch

    def update_priorities(index: Tensor, td_error: Tensor) -> None:
        replay.update_priorities(index, td_error)
        (replay.max_priority,) = comm.all_reduce_max(replay.max_priority)

    return sampler._replace(sample=sample, update_priorities=update_priorities)


def _normalizes_by_batch(settings: ReplaySettings) -> bool:
    return settings.prioritized and settings.normalize_weights == "batch"


def _relative_to_batch(sampler: Sampler, comm: Comm | None = None) -> Sampler:
    """Divide importance weights by the largest of the batch, which may be one of all ranks."""

    def sample(*, beta: float) -> ReplayBatch:
        batch = sampler.sample(beta=beta)
        largest = batch.weight.amax()
        if comm is not None:
            largest.fill_(*comm.all_reduce_max(float(largest)))
        batch.weight.div_(largest)
        return batch

    return sampler._replace(sample=sample)
