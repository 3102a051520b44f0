"""A rollout that is learned from in whole sequences of rows, for networks that remember.

Every environment's T rows are cut into sequences of L, the last of them perhaps shorter. With each
is stored what the network remembered before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.buffers.rollout.buffer import RolloutBuffer, pick, touched
from steadyrl.buffers.transfer import send
from steadyrl.core.saved import Saved


class SequenceBatch(NamedTuple):
    """S sequences of L rows, one after the other, on the training device; some rows only fill."""

    obs: Tensor  # [S·L, *observation_shape]
    action: Tensor  # [S·L, *action_shape]
    log_prob: Tensor  # [S·L]
    value: Tensor  # [S·L]
    advantage: Tensor  # [S·L]
    return_: Tensor  # [S·L]
    counts: Tensor  # [S·L] which are learned from
    starts: Tensor  # [S·L] which begin an episode
    carry: Tensor  # [S, …] what was remembered before the first row of each


class Chosen(NamedTuple):
    """S sequences of an epoch."""

    sequences: Tensor  # [S] which of all K·N
    rows: Tensor  # [S·L] which of all T·N rows
    counts: Tensor  # [S·L] which of them are learned from


def bytes_of_sequences(steps: int, num_envs: int, length: int, carry: int) -> int:
    """Return what such a rollout needs more than another, with `carry` bytes an environment."""
    sequences = -(-steps // length) * num_envs
    return sequences * (carry + length * 9)


class SequenceRollout(RolloutBuffer):
    """A rollout with the carry [K, N, …] at the start of every sequence."""

    kind: type[Any] = SequenceBatch  # a batch: a row's fields, and then a sequence's

    def __init__(self, *, length: int, together: int, carry: tuple[int, ...], **rows: Any) -> None:
        """Cut into sequences of `length` rows, of which `together` are a minibatch."""
        super().__init__(**rows)
        self._length, self._together = length, together
        (steps, envs), device = self.reward.shape, rows["device"]
        count = -(-steps // length)
        self.carry = touched((count, envs, *carry), torch.float32, device)
        t = torch.arange(count * length, device=device).view(count, 1, length)
        env = torch.arange(envs, device=device).view(1, envs, 1)
        # Those after the last row of a sequence that is shorter are the last row again.
        self._rows = (t.clamp(max=steps - 1) * envs + env).flatten(0, 1)  # [K·N, L]
        self._inside = (t < steps).expand(count, envs, length).flatten(0, 1)

    def remember(self, carry: Tensor) -> None:
        """Keep what is remembered [N, …] before the row that is added next."""
        if self.position % self._length == 0 and not self.full:
            self.carry[self.position // self._length] = carry

    def sequences(self, count: int, generator: torch.Generator) -> Iterator[Chosen]:
        """Yield one epoch: every sequence once, in `count` parts, all of one size.

        What a part lacks is filled with a sequence again, of which no row counts.
        """
        learned = self._learned()
        order = torch.randperm(len(self._rows), generator=generator)
        if self._rows.device.type != "cpu":
            (order,) = send(self._rows.device, order.numpy())
        for part in order.tensor_split(count):
            lacking = self._together - len(part)
            sequences = torch.cat((part, part[:1].expand(lacking)))
            rows = self._rows[sequences]
            counts = self._inside[sequences] & learned[rows]
            counts[len(part) :] = False
            yield Chosen(sequences, rows.flatten(), counts.flatten())

    def in_order(self) -> Iterator[tuple[Chosen, SequenceBatch]]:
        """Yield every sequence once, some at a time, before the rollout is finished; all rows of
        theirs count."""
        (learned,) = send(self._rows.device, self.flags[-1].flatten().numpy())
        places = torch.arange(len(self._rows), device=self._rows.device)
        for sequences in places.split(self._together):
            rows, inside = self._rows[sequences].flatten(), self._inside[sequences].flatten()
            chosen = Chosen(sequences, rows, inside)
            yield chosen, self._batch(chosen, learned)

    def batch(self, chosen: Chosen) -> SequenceBatch:
        """Return the rows of these sequences."""
        return self._batch(chosen, self._learned())

    def _batch(self, chosen: Chosen, learned: Tensor) -> SequenceBatch:
        flat, envs = self.flat(), self.carry.shape[1]
        # The row after one that is not valid begins an episode; the carry knows of the first row.
        starts = torch.cat((torch.zeros_like(learned[:envs]), ~learned[:-envs]))
        carry = self.carry.flatten(0, 1).index_select(0, chosen.sequences)
        rows: SequenceBatch = self.kind(
            *pick(flat, chosen.rows), chosen.counts, starts[chosen.rows], carry
        )
        return rows

    def _learned(self) -> Tensor:
        """Return which of all T·N rows are valid."""
        learned = self._rows.new_zeros(self.reward.numel(), dtype=torch.bool)
        learned[self.valid] = True
        return learned

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"carry": self.carry[: self._begun], **super().state_dict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._take_rows(Saved(state, "rollout"), "carry", self._begun)

    @property
    def _begun(self) -> int:
        """How many sequences have a row."""
        return -(-self.position // self._length)
