"""The rollout: T rows of the timeline on the training device, learned from and then forgotten.

On them, generalised advantage estimation (Schulman et al. 2016):
δ_t = r_t + γ (1 − terminated_t) V_{t+1} − V_t and A_t = δ_t + γ λ (1 − ended_t) A_{t+1}.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers.kernel import kernel
from memory.budget import require
from memory.state import Stateful


class RolloutBatch(NamedTuple):
    """M valid rows of a rollout, on the training device."""

    obs: Tensor  # [M, *observation_shape]
    action: Tensor  # [M, *action_shape]
    log_prob: Tensor  # [M]
    value: Tensor  # [M]
    advantage: Tensor  # [M]
    return_: Tensor  # [M]


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
            + 3 + 2 * 8 + 3 * 8  # flags, factors, indices and their order in an epoch
        )  # fmt: skip
        require("rollout", needed + beside, device=device if device.type == "cuda" else None)
        self.obs = self._on_device((*rows, *observation_shape), observation_dtype)
        self.action = self._on_device((*rows, *action_shape), action_dtype)
        self.log_prob = self._on_device(rows, torch.float32)
        self.value = self._on_device((steps + 1, num_envs), torch.float32)  # and V(obs[T])
        self.advantage = self._on_device(rows, torch.float32)
        self.return_ = self._on_device(rows, torch.float32)
        self.reward = self._on_host(rows, torch.float32)
        self._flags = self._on_host((3, *rows), torch.bool)  # terminated, truncated, valid
        self._factors = self._on_host((2, *rows), torch.float64)
        self._learned = self._on_host((steps * num_envs,), torch.int64)  # the valid rows
        kept = (self.obs, self.action, self.log_prob, self.value)
        self._on_numpy = device.type == "cpu"
        self._decided: list[Any] = [part.numpy() if self._on_numpy else part for part in kept]
        self._given: tuple[NDArray, ...] = (self.reward.numpy(), *self._flags.numpy())
        self._copied: torch.cuda.Event | None = None  # host memory may be written again
        self._position = 0
        self._valid: Tensor | None = None  # see `valid`

    @property
    def full(self) -> bool:
        """Whether all rows are there."""
        return self._position == self._steps

    @property
    def valid(self) -> Tensor:
        """The indices [M], among all T·N rows, of those to learn from; once it is finished."""
        if self._valid is None:
            raise RuntimeError("rollout: finish it before learning from it")
        return self._valid

    @property
    def nbytes(self) -> int:
        """Bytes held, on the device and on the host."""
        return sum(part.nbytes for part in (*self._stored(), *self._computed()))

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
        t = self._position
        if t == self._steps:
            raise RuntimeError(f"rollout: all {t} rows are filled; finish and clear it first")
        if t == 0 and self._copied is not None:
            self._copied.synchronize()
        for store, part in zip(self._decided, (obs, action, log_prob, value), strict=True):
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
        self._position = t + 1

    def finish(self, last_value: Tensor, *, gamma: float, gae_lambda: float) -> None:
        """Compute advantages and returns in place, given V(obs[T]) [N]."""
        if not self.full:
            raise RuntimeError(f"rollout: only {self._position} of {self._steps} rows are filled")
        self.value[-1] = last_value.detach()
        bootstrap, carry = self._factors.numpy()
        rewards, terminated, truncated, valid = self._given
        factors(
            terminated, truncated, valid,
            gamma=gamma, gae_lambda=gae_lambda, bootstrap=bootstrap, carry=carry,
        )  # fmt: skip
        learned = np.flatnonzero(valid)
        self._learned.numpy()[: len(learned)] = learned
        self._valid = self._learned[: len(learned)].to(self._device, non_blocking=True)
        if self._device.type == "cpu":
            value, advantage = self.value.numpy(), self.advantage.numpy()
            gae_host(rewards, value, bootstrap, carry, advantage)
        else:
            reward = self.reward.to(self._device, non_blocking=True)
            on_device = self._factors.to(self._device, non_blocking=True)
            gae_torch(reward, self.value, on_device[0], on_device[1], self.advantage)
            self._mark_copied()
        torch.add(self.advantage, self.value[:-1], out=self.return_)

    def minibatches(self, count: int, generator: torch.Generator) -> Iterator[RolloutBatch]:
        """Yield one epoch: every valid row once, in `count` parts whose sizes differ by 1 at most.

        With fewer valid rows than parts there are fewer parts: none is empty.
        """
        valid = self.valid
        shuffled = torch.randperm(len(valid), generator=generator, device=generator.device)
        order = valid[shuffled.to(self._device)]
        parts = (self.obs, self.action, self.log_prob, self.value[:-1])
        flat = [part.flatten(0, 1) for part in (*parts, self.advantage, self.return_)]
        for rows in order.tensor_split(max(1, min(count, len(order)))):
            if len(rows):
                yield RolloutBatch(*(part.index_select(0, rows) for part in flat))

    def clear(self) -> None:
        """Forget the rows; the memory stays."""
        self._position = 0
        self._valid = None

    def release(self) -> None:
        """Free all memory; the buffer is not used afterwards."""
        vars(self).clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows filled so far; tensors share the buffer's memory."""
        names = ("obs", "action", "log_prob", "value", "reward")
        t = self._position
        rows: dict[str, Any] = {name: getattr(self, name)[:t] for name in names}
        return {"position": t, "flags": self._flags[:, :t], **rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; advantages are computed anew by `finish`."""
        self.clear()
        t = int(state["position"])
        if t > self._steps or state["obs"].shape[1:] != self.obs.shape[1:]:
            saved, here = tuple(state["obs"].shape), tuple(self.obs.shape)
            raise ValueError(f"rollout: saved observations {saved} do not fit into {here}")
        for name in ("obs", "action", "log_prob", "value", "reward"):
            getattr(self, name)[:t] = state[name]
        self._flags[:, :t] = state["flags"]
        self._position = t

    def _stored(self) -> tuple[Tensor, ...]:
        return (self.obs, self.action, self.log_prob, self.value, self.reward, self._flags)

    def _computed(self) -> tuple[Tensor, ...]:
        return (self.advantage, self.return_, self._factors, self._learned)

    def _mark_copied(self) -> None:
        if self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(self._device))

    def _on_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device).zero_()  # touched

    def _on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda").zero_()


def factors(
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    valid: NDArray[np.bool_],
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap: NDArray[np.float64],
    carry: NDArray[np.float64],
) -> None:
    """Write γ (1 − terminated) and γ λ (1 − ended), all [T, N].

    An episode ends at t also when row t + 1 is invalid: a cut is a truncation of row t.
    """
    np.multiply(~terminated, gamma, out=bootstrap)
    ended = terminated | truncated
    ended[:-1] |= ~valid[1:]
    np.multiply(~ended, gamma * gae_lambda, out=carry)


@kernel
def gae_host(reward, value, bootstrap, carry, advantage):  # type: ignore[no-untyped-def]
    """Write advantages [T, N] from rewards [T, N], values [T + 1, N] and the factors."""
    steps, envs = reward.shape
    following = np.zeros(envs)
    for t in range(steps - 1, -1, -1):
        for env in range(envs):
            delta = reward[t, env] + bootstrap[t, env] * value[t + 1, env] - value[t, env]
            following[env] = delta + carry[t, env] * following[env]
            advantage[t, env] = following[env]


def gae_torch(
    reward: Tensor, value: Tensor, bootstrap: Tensor, carry: Tensor, advantage: Tensor
) -> None:
    """Write the same with torch operations: one launch per row once the δ are known."""
    known = value.double()
    delta = torch.addcmul(reward - known[:-1], bootstrap, known[1:])
    for t in range(len(delta) - 2, -1, -1):
        delta[t].addcmul_(carry[t], delta[t + 1])
    advantage.copy_(delta)
