"""Show the agent the last k frames; only one frame a row crosses from the environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.types import Step, VectorEnv


class FrameStackEnv(VectorEnv):
    """Concatenate the last k frames of an episode along axis 0, oldest first.

    Before an episode's first frame the first frame is repeated.
    """

    def __init__(self, env: VectorEnv, frames: int) -> None:
        self._env = env
        self._channels = env.spec.frame_shape[0]
        self.spec = replace(env.spec, frame_stack=frames)
        shape = (env.spec.num_envs, *self.spec.observation_shape)
        self._stacks = (np.zeros(shape, env.spec.dtype), np.zeros(shape, env.spec.dtype))
        self._turn = 0

    @property
    def observation(self) -> NDArray[Any]:
        """The current observations [N, k·C, …], which the next action is decided on."""
        return self._stacks[self._turn]

    @property
    def starts(self) -> NDArray[np.bool_]:
        """Whose current observation is the first of an episode [N]."""
        return self._env.starts

    def reset(self) -> NDArray[Any]:
        """Start every environment anew and return the first observations [N, k·C, …]."""
        frames = self._env.reset()
        self._turn = 1 - self._turn
        stack = self._stacks[self._turn]
        stack[...] = self._repeat(frames)
        return stack

    def send(self, action: NDArray[Any]) -> None:
        """Hand one action per environment over; rows that reset ignore theirs."""
        self._env.send(action)

    def receive(self) -> Step:
        """Return the row that the last `send` led to, its frames stacked."""
        step = self._env.receive()
        before = self._stacks[self._turn]
        self._turn = 1 - self._turn
        stack = self._stacks[self._turn]
        stack[:, : -self._channels] = before[:, self._channels :]
        stack[:, -self._channels :] = step.obs
        if np.count_nonzero(step.valid) < step.valid.size:
            first = ~step.valid
            stack[first] = self._repeat(step.obs[first])
        return step._replace(obs=stack)

    def _repeat(self, frames: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([frames] * self.spec.frame_stack, axis=1)

    def state_dict(self) -> dict[str, Any]:
        """Return the plain state of the environments and the stacks."""
        import torch  # here, so that a configuration is checked without it

        return {
            "env": self._env.state_dict(),
            "stack": torch.from_numpy(self.observation.copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._env.load_state_dict(state["env"])
        self._turn = 1 - self._turn
        self._stacks[self._turn][...] = state["stack"].numpy()

    def close(self) -> None:
        """Close the environments."""
        self._env.close()
