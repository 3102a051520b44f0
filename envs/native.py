"""Environments that Gymnasium itself steps as one batch."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from envs.batch import Simulator, fill
from envs.making import find_spec, unknown_keyword
from envs.row import Row
from envs.settings import EnvSettings
from envs.single import Remarks
from envs.spaces import encoders
from envs.types import EnvSpec
from memory.errors import SettingError


class NativeSimulator(Simulator):
    """A vector environment of Gymnasium's own, with one generator for all N."""

    def __init__(self, settings: EnvSettings, *, num_envs: int) -> None:
        self._env = env = _make(settings, num_envs)
        try:
            encoder, decoder = encoders(
                settings.id, env.single_observation_space, env.single_action_space
            )
        except BaseException:
            self.close()
            raise
        if settings.checked:
            Remarks(settings.id)(encoder.remark)
        self.spec = EnvSpec.of(settings.id, num_envs, encoder, decoder.spec)
        self._encode, self._decode = encoder.write, decoder.decode
        self._action_dtype = env.action_space.dtype
        self._to_do: NDArray[Any] = np.zeros(0)

    def close(self) -> None:
        """Close the environment; safe to call twice and after a failure."""
        self._env.close()

    def start(self, row: Row, seeds: list[int]) -> None:
        """Seed and reset all environments; write their frames."""
        observations, _ = self._env.reset(seed=seeds[0])
        self._encode(observations, row.obs, (self.spec.num_envs,))

    def send(self, action: NDArray[Any]) -> None:
        """Begin a step of all environments."""
        self._to_do = np.asarray(self._decode(action), self._action_dtype)

    def receive(self, row: Row, done: NDArray[np.bool_]) -> None:
        """Finish the step and write the row."""
        observations, reward, terminated, truncated, _ = self._env.step(self._to_do)
        self._encode(observations, row.obs, (self.spec.num_envs,))
        fill(row, done, reward, terminated, truncated)

    def snapshot(self) -> dict[str, Any] | None:
        """Return numbers, arrays and generator of a simulator that consists of nothing else."""
        import torch

        values: dict[str, Any] = {}
        for name, value in vars(self._env.unwrapped).items():
            if isinstance(value, np.ndarray):
                values[name] = torch.from_numpy(value.copy())
            elif value is None or isinstance(value, int | float | str):
                values[name] = value
            elif isinstance(value, np.random.Generator):
                values[name] = value.bit_generator.state
            elif not isinstance(value, gym.Space | gym.envs.registration.EnvSpec):
                return None
        return values

    def restore(self, saved: dict[str, Any]) -> bool:
        """Put a snapshot back; it always can be."""
        self._env.reset(seed=0)  # makes the generator that the snapshot is put into
        env = self._env.unwrapped
        for name, value in saved.items():
            current = getattr(env, name)
            if isinstance(current, np.random.Generator):
                current.bit_generator.state = value
            elif isinstance(current, np.ndarray):
                setattr(env, name, value.numpy().copy())
            else:
                setattr(env, name, value)
        return True


def _make(settings: EnvSettings, num_envs: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    spec = find_spec(settings.id)
    if spec.vector_entry_point is None:
        raise SettingError(
            "backend", "native", f"{settings.id} has no vector environment of its own; use sync"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            env = gym.make_vec(
                spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **settings.kwargs
            )
        except TypeError as error:
            raise unknown_keyword(settings, error) or error from None
    if env.metadata.get("autoreset_mode") is not AutoresetMode.NEXT_STEP:
        env.close()
        raise SettingError(
            "backend", "native", f"{settings.id} does not reset on the step after an episode's end"
        )
    return env


def probe_native(settings: EnvSettings) -> EnvSpec:
    """Say what the environment offers, with a batch of one."""
    simulator = NativeSimulator(settings.for_evaluation(), num_envs=1)
    simulator.close()
    return simulator.spec
