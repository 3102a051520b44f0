"""Environments that Gymnasium itself steps as one batch."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from envs.lockstep import LockstepEnv
from envs.making import find_spec
from envs.rows import Rows
from envs.seeding import episode_seed
from envs.settings import EnvSettings
from envs.spaces import encoders
from envs.types import EnvironmentFailedError, EnvSpec
from memory.errors import SettingError

LOG = logging.getLogger("steadyrl")
Snapshot = dict[str, Any]


class NativeVectorEnv(LockstepEnv):
    """A vector environment of Gymnasium's own: one generator for all N, seeded at each reset."""

    def __init__(self, settings: EnvSettings, *, seed: int, num_envs: int) -> None:
        self._seed = seed
        self._resets = 0
        self._cut = False
        self._env = env = _make(settings, num_envs)
        try:
            encoder, decoder = encoders(
                settings.id, env.single_observation_space, env.single_action_space
            )
            super().__init__(
                EnvSpec(
                    id=settings.id,
                    num_envs=num_envs,
                    frame_shape=encoder.shape,
                    dtype=encoder.dtype,
                    frame_stack=1,
                    action=decoder.spec,
                )
            )
        except BaseException:
            self.close()
            raise
        self._encode, self._decode = encoder.write, decoder.decode
        self._action_dtype = env.action_space.dtype
        self._done = np.ones(num_envs, np.bool_)
        self._to_do: NDArray[Any] = np.zeros(0)

    def close(self) -> None:
        """Close the environment; safe to call twice and after a failure."""
        self._env.close()

    def _start_all(self, rows: Rows) -> None:
        seed = episode_seed(self._seed, 0, self._resets)
        self._resets += 1
        self._cut = False
        observations, _ = self._env.reset(seed=seed)
        self._write(observations, rows)
        self._done[:] = False
        rows.set_all_reset()

    def _launch(self, action: NDArray[Any], rows: Rows) -> None:
        self._to_do = np.asarray(self._decode(action), self._action_dtype)

    def _collect(self, rows: Rows) -> None:
        if self._cut:
            self._start_all(rows)
            return
        try:
            observations, reward, terminated, truncated, _ = self._env.step(self._to_do)
            self._write(observations, rows)
        except Exception as error:
            raise EnvironmentFailedError(
                f"the environments failed at step {self.steps}: {type(error).__name__}: {error}"
            ) from error
        np.logical_not(self._done, out=rows.valid)
        rows.reward[:] = reward
        rows.terminated[:] = terminated
        rows.truncated[:] = truncated
        np.logical_or(rows.terminated, rows.truncated, out=self._done)

    def _write(self, observations: Any, rows: Rows) -> None:
        batch = isinstance(observations, np.ndarray) and observations.shape == rows.obs.shape
        if batch and rows.obs.dtype == np.float32:
            rows.obs[...] = observations
            return
        for observation, frame in zip(observations, rows.frames, strict=True):
            self._encode(observation, frame)

    def state_dict(self) -> dict[str, Any]:
        """Return the plain state: statistics and, where it can be taken, the simulator's own."""
        import torch  # here, so that a configuration is checked without it

        if self._under_way:
            raise RuntimeError("the state is whole between receive() and send() only")
        return {
            "steps": self.steps,
            "started": self._started,
            "seed": self._seed,
            "resets": self._resets,
            "cut": self._cut,
            "done": self._done.tolist(),
            "simulator": _snapshot(self._env.unwrapped) if self._started else None,
            "obs": torch.from_numpy(self.observation.copy()),
            "statistics": self._statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; a simulator that keeps its state to itself is cut."""
        if len(state["done"]) != self.spec.num_envs:
            raise ValueError(
                f"the state is of {len(state['done'])} environments, there are {self.spec.num_envs}"
            )
        self.steps, self._started, self._seed = state["steps"], state["started"], state["seed"]
        self._resets, self._cut = state["resets"], state["cut"]
        self._under_way = False
        self._done[:] = state["done"]
        self._statistics.load_state_dict(state["statistics"])
        self._next().obs[...] = state["obs"].numpy()
        if not self._started:
            return
        if state["simulator"] is None:
            LOG.warning("the environments cannot continue their episodes: they start new ones")
            self._cut = True
            return
        self._env.reset(seed=0)  # makes the generator that the snapshot is put into
        _restore(self._env.unwrapped, state["simulator"])


def _make(settings: EnvSettings, num_envs: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    spec = find_spec(settings.id)
    if spec.vector_entry_point is None:
        raise SettingError(
            "backend", "native", f"{settings.id} has no vector environment of its own; use sync"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = gym.make_vec(
            spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **settings.kwargs
        )
    if env.metadata.get("autoreset_mode") is not AutoresetMode.NEXT_STEP:
        env.close()
        raise SettingError(
            "backend", "native", f"{settings.id} does not reset on the step after an episode's end"
        )
    return env


def _snapshot(env: Any) -> Snapshot | None:
    """Return numbers, arrays and generator of a simulator that consists of nothing else."""
    import torch

    values: Snapshot = {}
    for name, value in vars(env).items():
        if isinstance(value, np.ndarray):
            values[name] = torch.from_numpy(value.copy())
        elif isinstance(value, int | float | str | None):
            values[name] = value
        elif isinstance(value, np.random.Generator):
            values[name] = value.bit_generator.state
        elif not isinstance(value, gym.Space | gym.envs.registration.EnvSpec):
            return None
    return values


def _restore(env: Any, values: Snapshot) -> None:
    for name, value in values.items():
        current = getattr(env, name)
        if isinstance(current, np.random.Generator):
            current.bit_generator.state = value
        elif isinstance(current, np.ndarray):
            setattr(env, name, value.numpy().copy())
        else:
            setattr(env, name, value)
