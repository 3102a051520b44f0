"""Rollout buffer for recurrent networks: minibatches of whole sequences.

Each environment's T timesteps are split into sequences of length L (the last may be shorter). The
hidden state before each sequence is stored with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.buffers.memory_layout import to_device
from steadyrl.buffers.rollout.buffer import (
    RolloutBatch,
    RolloutBuffer,
    batch_type,
    gather_minibatch,
    prefaulted,
)
from steadyrl.core.saved_state import Saved


class SequenceBatch(NamedTuple):
    """S sequences of L samples, concatenated, on the training device; some samples are padding."""

    obs: Tensor  # [S·L, *observation_shape]
    action: Tensor  # [S·L, *action_shape]
    log_prob: Tensor  # [S·L]
    value: Tensor  # [S·L]
    advantage: Tensor  # [S·L]
    return_: Tensor  # [S·L]
    loss_mask: Tensor  # [S·L] bool: neither padding nor a reset
    episode_starts: Tensor  # [S·L] bool: first step of an episode
    hidden_state: Tensor  # [S, …] hidden state before each sequence


class SequenceIndex(NamedTuple):
    """Indices of S sequences of a rollout."""

    sequences: Tensor  # [S] among all K·N sequences
    timesteps: Tensor  # [S·L] among all T·N samples
    loss_mask: Tensor  # [S·L] bool: neither padding nor a reset


def sequence_bytes(steps: int, num_envs: int, length: int, hidden_state: int) -> int:
    """Return the extra bytes of a sequence rollout; `hidden_state`: bytes per environment."""
    sequences = -(-steps // length) * num_envs
    return sequences * (hidden_state + length * 9)


class SequenceRollout(RolloutBuffer):
    """Rollout buffer with the hidden state [K, N, …] at the start of K·N sequences."""

    def __init__(
        self, *, length: int, sequences_per_batch: int, hidden_state: tuple[int, ...], **buffer: Any
    ) -> None:
        """Split into sequences of `length` timesteps, `sequences_per_batch` in a minibatch."""
        super().__init__(**buffer)
        self._length, self._sequences_per_batch = length, sequences_per_batch
        # Fields of a sample first, then those of a sequence.
        self._batch_type = batch_type(SequenceBatch, *self.fields, after=len(RolloutBatch._fields))
        (steps, envs), device = self.reward.shape, buffer["device"]
        count = -(-steps // length)
        self.hidden_state = prefaulted((count, envs, *hidden_state), torch.float32, device)
        t = torch.arange(count * length, device=device).view(count, 1, length)
        env = torch.arange(envs, device=device).view(1, envs, 1)
        # A shorter last sequence is padded with its last timestep.
        self._steps_of_sequence = (t.clamp(max=steps - 1) * envs + env).flatten(0, 1)  # [K·N, L]
        self._in_rollout = (t < steps).expand(count, envs, length).flatten(0, 1)

    @override
    def store_hidden_state(self, hidden_state: Tensor | None) -> None:
        """Store the hidden state [N, …] before the next timestep, if a sequence starts there."""
        assert hidden_state is not None
        if self.position % self._length == 0 and not self.full:
            self.hidden_state[self.position // self._length] = hidden_state

    def shuffled_sequences(self, count: int, generator: torch.Generator) -> Iterator[SequenceIndex]:
        """Yield one epoch: every sequence once, in `count` minibatches of the same size.

        Smaller minibatches are padded with a repeated sequence whose loss mask is False.
        """
        valid = self._valid_mask()
        order = torch.randperm(len(self._steps_of_sequence), generator=generator)
        order = to_device(order.numpy(), self._steps_of_sequence.device)
        for part in order.tensor_split(count):
            lacking = self._sequences_per_batch - len(part)
            sequences = torch.cat((part, part[:1].expand(lacking)))
            timesteps = self._steps_of_sequence[sequences]
            loss_mask = self._in_rollout[sequences] & valid[timesteps]
            loss_mask[len(part) :] = False
            yield SequenceIndex(sequences, timesteps.flatten(), loss_mask.flatten())

    def sequential_batches(self) -> Iterator[tuple[SequenceIndex, SequenceBatch]]:
        """Yield every sequence once in order, a minibatch at a time; resets are not masked.

        Can be called before `compute_advantages`.
        """
        device = self._steps_of_sequence.device
        valid = to_device(self.valid.flatten().numpy(), device)
        order = torch.arange(len(self._steps_of_sequence), device=device)
        for sequences in order.split(self._sequences_per_batch):
            index = SequenceIndex(
                sequences,
                self._steps_of_sequence[sequences].flatten(),
                self._in_rollout[sequences].flatten(),
            )
            yield index, self._batch(index, valid)

    def batch(self, index: SequenceIndex) -> SequenceBatch:
        """Return the samples of these sequences."""
        return self._batch(index, self._valid_mask())

    def _batch(self, index: SequenceIndex, valid: Tensor) -> SequenceBatch:
        flat, envs = self.flat(), self.hidden_state.shape[1]
        # An invalid timestep is followed by an episode's first step. For a rollout's first timestep
        # the stored hidden state is reset already.
        episode_starts = torch.cat((torch.zeros_like(valid[:envs]), ~valid[:-envs]))
        hidden_state = self.hidden_state.flatten(0, 1).index_select(0, index.sequences)
        batch: SequenceBatch = self._batch_type(
            *gather_minibatch(flat, index.timesteps),
            index.loss_mask,
            episode_starts[index.timesteps],
            hidden_state,
        )
        return batch

    def _valid_mask(self) -> Tensor:
        """Return the mask [T·N] of valid samples, made on the device: nothing is sent to it."""
        valid = self._steps_of_sequence.new_zeros(self.reward.numel(), dtype=torch.bool)
        valid[self.valid_indices] = True
        return valid

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "hidden_state": self.hidden_state[: self._started_sequences],
            **super().state_dict(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        saved = Saved(state, "rollout")
        self._load_steps(saved, "hidden_state", self.hidden_state, self._started_sequences)

    @property
    def _started_sequences(self) -> int:
        """Number of sequences with at least one timestep."""
        return -(-self.position // self._length)
