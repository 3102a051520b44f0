"""Rollout buffer: T timesteps on the training device, learned from once and then cleared.

Advantages are generalised advantage estimates (Schulman et al. 2016):
δ_t = r_t + γ (1 − terminated_t) V_{t+1} − V_t and A_t = δ_t + γ λ (1 − ended_t) A_{t+1}.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.buffers.memory_layout import HOST, IS_VALID, send
from steadyrl.buffers.rollout.gae import gae_host, gae_torch
from steadyrl.core.saved_state import Saved
from steadyrl.core.state import Stateful
from steadyrl.memory.budget import require


class RolloutBatch(NamedTuple):
    """M samples (valid timesteps) of a rollout, on the training device."""

    obs: Tensor  # [M, *observation_shape]
    action: Tensor  # [M, *action_shape]
    log_prob: Tensor  # [M]
    value: Tensor  # [M]
    advantage: Tensor  # [M]
    return_: Tensor  # [M]


class SampleField(NamedTuple):
    """An additional field of a rollout's samples, saved with them."""

    shape: tuple[int, ...]  # of one sample
    dtype: torch.dtype
    fill: float | None = None  # value as each rollout begins; None: whatever was there

    @property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * self.dtype.itemsize


@cache
def batch_type(like: type[Any], *sample_fields: str, after: int) -> type[Any]:
    """Return a NamedTuple class with additional fields after the first `after` of another's."""
    if not sample_fields:
        return like
    make: Any = namedtuple  # its fields are known when an agent is built
    names = like._fields  # type: ignore[attr-defined]
    made: type[Any] = make(like.__name__, (*names[:after], *sample_fields, *names[after:]))
    return made


Batch = TypeVar("Batch", bound=tuple[Tensor, ...])

# scratch(like, M) returns preallocated tensors for M samples of a batch like this one.
Scratch = Callable[[Any, int], Any]


class RolloutBuffer(Stateful):
    """Tensors [T, N, …], allocated once, filled by copy; advantages are computed in place.

    Outputs of the policy are stored on `device`. Outputs of the environments stay in host memory
    (where `reward` [T, N] may be scaled) until `compute_advantages` copies them to the device.
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
        copies: int = 0,
        extra_bytes: int = 0,
        fields: Mapping[str, SampleField] = {},
    ) -> None:
        """Require memory, then allocate.

        Memory is required for all timesteps, for `copies` of samples in minibatches, and for
        `extra_bytes` of the owner. Samples have `fields` besides those of `RolloutBatch`.
        """
        self._steps, self._device = steps, device
        shape = (steps, num_envs)
        sample_bytes = (
            math.prod(observation_shape) * observation_dtype.itemsize
            + math.prod(action_shape) * action_dtype.itemsize
            + 5 * 4  # log-probability, value, advantage, return, reward
            + sum(field.nbytes for field in fields.values())
        )
        bookkeeping = 3 + 3 * 8  # flags, indices and their order in an epoch
        if device.type != "cpu":
            bookkeeping += 6 * 8  # sums and factors in float64
        needed = steps * num_envs * (sample_bytes + bookkeeping)
        require("rollout", needed + copies * sample_bytes + extra_bytes, device=device)
        self.obs = prefaulted((*shape, *observation_shape), observation_dtype, device)
        self.action = prefaulted((*shape, *action_shape), action_dtype, device)
        self.log_prob = prefaulted(shape, torch.float32, device)
        self.value = prefaulted((steps + 1, num_envs), torch.float32, device)  # and V(obs[T])
        self.advantage = prefaulted(shape, torch.float32, device)
        self.return_ = prefaulted(shape, torch.float32, device)
        self.reward = prefaulted(shape, torch.float32)
        self.flags = prefaulted((3, *shape), torch.bool)  # terminated, truncated, valid [3, T, N]
        self._filled = {name: field.fill for name, field in fields.items()}
        self.fields = {
            name: prefaulted((*shape, *field.shape), field.dtype, device)
            for name, field in fields.items()
        }
        self.sample_type = batch_type(RolloutBatch, *fields, after=len(RolloutBatch._fields))
        stored = (self.obs, self.action, self.log_prob, self.value)
        self._on_numpy = device.type == "cpu"
        self._policy_outputs: list[Any] = [
            part.numpy() if self._on_numpy else part for part in stored
        ]
        self._env_outputs: tuple[NDArray, ...] = (self.reward.numpy(), *self.flags.numpy())
        self.position = 0  # timesteps stored
        self.evaluated = True  # whether the actor gave log-probabilities and values of all of them
        self._valid_indices: Tensor | None = None  # see `valid_indices`
        self.clear()

    @property
    def full(self) -> bool:
        """Whether all T timesteps are stored."""
        return self.position == self._steps

    @property
    def valid(self) -> Tensor:
        """Which samples [T, N] count, in host memory: not those of timesteps that reset."""
        return self.flags[IS_VALID]

    @property
    def valid_indices(self) -> Tensor:
        """Indices [M] of the valid samples among all T·N; set by `compute_advantages`."""
        if self._valid_indices is None:
            raise RuntimeError("rollout: call compute_advantages() before learning from it")
        return self._valid_indices

    @property
    def nbytes(self) -> int:
        """Allocated bytes, on the device and in host memory."""
        own = [part for part in vars(self).values() if isinstance(part, Tensor)]
        return sum(part.nbytes for part in (*own, *self.fields.values()))

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
        """Store one timestep: policy outputs [N, …] (tensors), environment outputs [N] (arrays).

        Log-probabilities and values may instead be written for the whole rollout before
        `compute_advantages`.
        """
        t = self.position
        if t == self._steps:
            raise RuntimeError(f"rollout: all {t} timesteps are filled; learn from it and clear it")
        parts: tuple[Tensor | None, ...] = (obs, action, log_prob, value)
        if not self._on_numpy:
            parts = self._move_to_device(parts)
        for store, part in zip(self._policy_outputs, parts, strict=True):
            if part is None:
                continue
            if part.requires_grad:
                raise ValueError(
                    "rollout: act under torch.inference_mode(); a stored autograd graph would leak"
                )
            # On the CPU, NumPy's assignment takes half the time of torch's.
            store[t] = part.numpy() if self._on_numpy else part
        outputs = reward, terminated, truncated, valid
        for array, output in zip(self._env_outputs, outputs, strict=True):
            array[t] = output
        if log_prob is None or value is None:
            self.evaluated = False
        self.position = t + 1

    def store_hidden_state(self, hidden_state: Tensor | None) -> None:
        """Store a recurrent policy's hidden state [N, …] before the next timestep."""

    def to_device(self, array: NDArray) -> Tensor:
        """Return a NumPy array as a tensor on the rollout's device."""
        return torch.from_numpy(array) if self._on_numpy else send(self._device, array)[0]

    def _move_to_device(self, parts: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return the tensors on the device; those in host memory are sent in one copy."""
        on_host = {
            i: part.numpy()
            for i, part in enumerate(parts)
            if part is not None and part.device.type == "cpu" and not part.requires_grad
        }
        sent = send(self._device, *on_host.values()) if on_host else []
        moved = dict(zip(on_host, sent, strict=True))
        return tuple(moved.get(i, part) for i, part in enumerate(parts))

    def rewards_since(self, begin: int) -> tuple[NDArray, NDArray]:
        """Return rewards and valid flags [R, N] from timestep `begin` on."""
        since = slice(begin, self.position)
        return self._env_outputs[0][since], self._env_outputs[-1][since]

    def compute_advantages(self, last_value: Tensor, *, gamma: float, gae_lambda: float) -> None:
        """Compute advantages and returns in place, given V(obs[T]) [N]."""
        if not self.full:
            raise RuntimeError(
                f"rollout: only {self.position} of {self._steps} timesteps are filled"
            )
        self.value[-1] = last_value.detach()
        valid = np.flatnonzero(self._env_outputs[-1])
        if self._on_numpy:
            self._valid_indices = torch.from_numpy(valid)
            value, advantage = self.value.numpy(), self.advantage.numpy()
            gae_host(self._env_outputs[0], value, self.flags.numpy(), gamma, gae_lambda, advantage)
        else:
            given = (self.reward.numpy(), self.flags.numpy(), valid)
            reward, flags, self._valid_indices = send(self._device, *given)
            gae_torch(reward, self.value, flags, gamma, gae_lambda, self.advantage)
        torch.add(self.advantage, self.value[:-1], out=self.return_)

    def minibatches(
        self, count: int, generator: torch.Generator, scratch: Scratch | None = None
    ) -> Iterator[RolloutBatch]:
        """Yield one epoch: every valid sample once, in `count` minibatches of (almost) equal size.

        Sizes differ by at most 1. With fewer valid samples than `count` there are fewer
        minibatches, none of them empty. With `scratch`, each minibatch overwrites the one before.
        """
        order, flat = self.shuffled(generator), self.flat()
        for index in order.tensor_split(max(1, min(count, len(order)))):
            if len(index):
                yield gather_minibatch(flat, index, scratch)

    def shuffled(self, generator: torch.Generator) -> Tensor:
        """Return the indices [M] of the valid samples in random order."""
        valid = self.valid_indices
        order = torch.randperm(len(valid), generator=generator)
        return valid.index_select(0, self.to_device(order.numpy()))

    def flat(self) -> Any:
        """Return all T·N samples, valid or not, as `sample_type`, sharing memory."""
        parts = (self.obs, self.action, self.log_prob, self.value[:-1])
        own = (*parts, self.advantage, self.return_)
        return self.sample_type(*(part.flatten(0, 1) for part in (*own, *self.fields.values())))

    def values_and_returns(self) -> tuple[Tensor, Tensor]:
        """Return values [M] and returns [M] of the valid samples."""
        valid = self.valid_indices
        value, return_ = self.value[:-1].flatten(), self.return_.flatten()
        return value.index_select(0, valid), return_.index_select(0, valid)

    def clear(self) -> None:
        """Reset to empty; memory stays allocated."""
        self.position, self.evaluated = 0, True
        self._valid_indices = None
        for name, fill in self._filled.items():
            if fill is not None:
                self.fields[name].fill_(fill)

    def release(self) -> None:
        """Free all memory; the buffer is not used afterwards."""
        vars(self).clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the timesteps stored so far; tensors share the buffer's memory."""
        names = ("obs", "action", "log_prob", "value", "reward")
        t = self.position
        tensors: dict[str, Any] = {name: getattr(self, name)[:t] for name in names}
        tensors |= {name: field[:t] for name, field in self.fields.items()}
        state = {"position": t, "evaluated": self.evaluated, "flags": self.flags[:, :t]}
        return state | tensors

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; advantages are not saved, `compute_advantages` comes later."""
        self.clear()
        saved = Saved(state, "rollout")
        t = saved.whole("position", 0, self._steps)
        theirs = getattr(saved.raw("obs"), "shape", (0,))
        if theirs[1:] != self.obs.shape[1:]:
            here = tuple(self.obs.shape)
            raise ValueError(f"rollout: saved observations {tuple(theirs)} do not fit into {here}")
        for name in ("obs", "action", "log_prob", "value", "reward"):
            self._load_steps(saved, name, getattr(self, name), t)
        for name, field in self.fields.items():
            self._load_steps(saved, name, field, t)
        self.flags[:, :t] = saved.tensor("flags", (3, t, *self.flags.shape[2:]), torch.bool)
        self.position = t
        self.evaluated = saved.boolean("evaluated")

    def _load_steps(self, saved: Saved, name: str, part: Tensor, steps: int) -> None:
        """Load the first `steps` timesteps of one tensor."""
        part[:steps] = saved.tensor(name, (steps, *part.shape[1:]), part.dtype)


def gather_minibatch(flat: Batch, index: Tensor, scratch: Scratch | None = None) -> Batch:
    """Return the samples `index` [M] of a batch, written into `scratch` if given."""
    if scratch is None:
        return type(flat)(*(part.index_select(0, index) for part in flat))
    batch: Batch = scratch(flat, len(index))
    for part, to in zip(flat, batch, strict=True):
        torch.index_select(part, 0, index, out=to)
    return batch


def prefaulted(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = HOST) -> Tensor:
    """Return zeros whose pages are already mapped: RSS does not grow later."""
    return torch.empty(shape, dtype=dtype, device=device).zero_()
