"""The rollout: T rows of the timeline on the training device, learned from and then forgotten.

On them, generalised advantage estimation (Schulman et al. 2016):
δ_t = r_t + γ (1 − terminated_t) V_{t+1} − V_t and A_t = δ_t + γ λ (1 − ended_t) A_{t+1}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.buffers.rollout.gae import gae_host, gae_torch
from steadyrl.buffers.transfer import send
from steadyrl.core.saved import Saved
from steadyrl.core.state import Stateful
from steadyrl.memory.budget import require

HOST = torch.device("cpu")


class RolloutBatch(NamedTuple):
    """M valid rows of a rollout, on the training device."""

    obs: Tensor  # [M, *observation_shape]
    action: Tensor  # [M, *action_shape]
    log_prob: Tensor  # [M]
    value: Tensor  # [M]
    advantage: Tensor  # [M]
    return_: Tensor  # [M]


Batch = TypeVar("Batch", bound=tuple[Tensor, ...])

Room = Callable[[Any, int], Any]  # for so many rows of a batch like this


class RolloutBuffer(Stateful):
    """Rows [T, N, …], allocated once, filled by copy, with advantages computed in place.

    What comes from the networks is kept on `device`; what comes from the environments stays on
    the host (`reward`, [T, N], may be scaled there) until `finish` brings it over in one go.
    """

    def __init__(
        self,
        *,
        steps: int,
        num_envs: int,
        observation_shape: tuple[int, ...],
        observation_dtype: torch.dtype,
        action_shape: tuple[int, ...],
        action_dtype: torch.dtype,
        device: torch.device,
        beside: int = 0,
    ) -> None:
        """Ask for the memory of all rows, and for what the owner needs `beside` it, in bytes."""
        self._steps, self._device = steps, device
        rows = (steps, num_envs)
        needed = steps * num_envs * (
            math.prod(observation_shape) * observation_dtype.itemsize
            + math.prod(action_shape) * action_dtype.itemsize
            + 5 * 4  # log-probability, value, advantage, return, reward
            + 3 + 3 * 8  # flags, indices and their order in an epoch
            + (0 if device.type == "cpu" else 6 * 8)  # sums and factors in float64
        )  # fmt: skip
        require("rollout", needed + beside, device=device if device.type == "cuda" else None)
        self.obs = touched((*rows, *observation_shape), observation_dtype, device)
        self.action = touched((*rows, *action_shape), action_dtype, device)
        self.log_prob = touched(rows, torch.float32, device)
        self.value = touched((steps + 1, num_envs), torch.float32, device)  # and V(obs[T])
        self.advantage = touched(rows, torch.float32, device)
        self.return_ = touched(rows, torch.float32, device)
        self.reward = touched(rows, torch.float32)
        self.flags = touched((3, *rows), torch.bool)  # terminated, truncated, valid
        kept = (self.obs, self.action, self.log_prob, self.value)
        self._on_numpy = device.type == "cpu"
        self._decided: list[Any] = [part.numpy() if self._on_numpy else part for part in kept]
        self._given: tuple[NDArray, ...] = (self.reward.numpy(), *self.flags.numpy())
        self.position = 0  # how many rows there are
        self._valid: Tensor | None = None  # see `valid`

    @property
    def full(self) -> bool:
        """Whether all rows are there."""
        return self.position == self._steps

    @property
    def valid(self) -> Tensor:
        """The indices [M], among all T·N rows, of those to learn from; once it is finished."""
        if self._valid is None:
            raise RuntimeError("rollout: finish it before learning from it")
        return self._valid

    @property
    def nbytes(self) -> int:
        """Bytes held, on the device and on the host."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))

    def add(
        self,
        obs: Tensor,
        action: Tensor,
        log_prob: Tensor | None,
        value: Tensor | None,
        reward: NDArray,
        terminated: NDArray,
        truncated: NDArray,
        valid: NDArray,
    ) -> None:
        """Copy one row in: tensors [N, …] from the device, arrays [N] from the environments.

        Log-probabilities and values may instead be filled in for all rows before `finish`.
        """
        t = self.position
        if t == self._steps:
            raise RuntimeError(f"rollout: all {t} rows are filled; finish and clear it first")
        parts: tuple[Tensor | None, ...] = (obs, action, log_prob, value)
        if not self._on_numpy:
            parts = self._there(parts)
        for store, part in zip(self._decided, parts, strict=True):
            if part is None:
                continue
            if part.requires_grad:
                raise ValueError(
                    "rollout: act under torch.inference_mode(); a graph kept would grow"
                )
            # On the host NumPy's assignment costs half of torch's.
            store[t] = part.numpy() if self._on_numpy else part
        rewards, ends, cuts, valids = self._given
        rewards[t], ends[t], cuts[t], valids[t] = reward, terminated, truncated, valid
        self.position = t + 1

    def brought(self, array: NDArray) -> Tensor:
        """Return an array of the host as a tensor where the rows are."""
        return torch.from_numpy(array) if self._on_numpy else send(self._device, array)[0]

    def _there(self, parts: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return a row's parts on the device: those that come from the host, in one copy."""
        come = [p is not None and p.device.type == "cpu" and not p.requires_grad for p in parts]
        arrays = [
            p.numpy() for p, comes in zip(parts, come, strict=True) if comes and p is not None
        ]
        sent = iter(send(self._device, *arrays)) if arrays else iter(())
        return tuple(next(sent) if comes else p for p, comes in zip(parts, come, strict=True))

    def rewards_since(self, begin: int) -> tuple[NDArray, NDArray]:
        """Return rewards and validity [R, N] of the rows from `begin` on."""
        return self._given[0][begin : self.position], self._given[-1][begin : self.position]

    def finish(self, last_value: Tensor, *, gamma: float, gae_lambda: float) -> None:
        """Compute advantages and returns in place, given V(obs[T]) [N]."""
        if not self.full:
            raise RuntimeError(f"rollout: only {self.position} of {self._steps} rows are filled")
        self.value[-1] = last_value.detach()
        learned = np.flatnonzero(self._given[-1])
        if self._on_numpy:
            self._valid = torch.from_numpy(learned)
            value, advantage = self.value.numpy(), self.advantage.numpy()
            gae_host(self._given[0], value, self.flags.numpy(), gamma, gae_lambda, advantage)
        else:
            given = (self.reward.numpy(), self.flags.numpy(), learned)
            reward, flags, self._valid = send(self._device, *given)
            gae_torch(reward, self.value, flags, gamma, gae_lambda, self.advantage)
        torch.add(self.advantage, self.value[:-1], out=self.return_)

    def minibatches(
        self, count: int, generator: torch.Generator, room: Room | None = None
    ) -> Iterator[RolloutBatch]:
        """Yield one epoch: every valid row once, in `count` parts whose sizes differ by 1 at most.

        With fewer valid rows than parts there are fewer parts: none is empty. With `room` each is
        written there, over the one before.
        """
        order, flat = self.shuffled(generator), self.flat()
        for rows in order.tensor_split(max(1, min(count, len(order)))):
            if len(rows):
                yield pick(flat, rows, room)

    def shuffled(self, generator: torch.Generator) -> Tensor:
        """Return the indices [M] of the valid rows in a new order."""
        valid = self.valid
        order = torch.randperm(len(valid), generator=generator)
        if not self._on_numpy:
            (order,) = send(self._device, order.numpy())
        return valid.index_select(0, order)

    def flat(self) -> RolloutBatch:
        """Return all T·N rows, valid or not, sharing memory."""
        parts = (self.obs, self.action, self.log_prob, self.value[:-1])
        return RolloutBatch(*(p.flatten(0, 1) for p in (*parts, self.advantage, self.return_)))

    def estimates(self) -> tuple[Tensor, Tensor]:
        """Return values and returns [M] of the rows to learn from."""
        value, return_ = self.value[:-1].flatten(), self.return_.flatten()
        return value.index_select(0, self.valid), return_.index_select(0, self.valid)

    def clear(self) -> None:
        """Forget the rows; the memory stays."""
        self.position = 0
        self._valid = None

    def release(self) -> None:
        """Free all memory; the buffer is not used afterwards."""
        vars(self).clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows filled so far; tensors share the buffer's memory."""
        names = ("obs", "action", "log_prob", "value", "reward")
        t = self.position
        rows: dict[str, Any] = {name: getattr(self, name)[:t] for name in names}
        return {"position": t, "flags": self.flags[:, :t], **rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; advantages are computed anew by `finish`."""
        self.clear()
        saved = Saved(state, "rollout")
        t = saved.whole("position", 0, self._steps)
        theirs = getattr(saved.raw("obs"), "shape", (0,))
        if theirs[1:] != self.obs.shape[1:]:
            here = tuple(self.obs.shape)
            raise ValueError(f"rollout: saved observations {tuple(theirs)} do not fit into {here}")
        for name in ("obs", "action", "log_prob", "value", "reward"):
            self._take_rows(saved, name, t)
        self.flags[:, :t] = saved.tensor("flags", (3, t, *self.flags.shape[2:]), torch.bool)
        self.position = t

    def _take_rows(self, saved: Saved, name: str, rows: int) -> None:
        """Take back the first so many rows of one kind."""
        part: Tensor = getattr(self, name)
        part[:rows] = saved.tensor(name, (rows, *part.shape[1:]), part.dtype)


def pick(flat: Batch, rows: Tensor, room: Room | None = None) -> Batch:
    """Return these rows [M] of a batch, written to where there is `room` for them."""
    if room is None:
        return type(flat)(*(part.index_select(0, rows) for part in flat))
    picked: Batch = room(flat, len(rows))
    for part, to in zip(flat, picked, strict=True):
        torch.index_select(part, 0, rows, out=to)
    return picked


def touched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = HOST) -> Tensor:
    """Return zeros whose pages exist, so that use adds none."""
    return torch.empty(shape, dtype=dtype, device=device).zero_()
