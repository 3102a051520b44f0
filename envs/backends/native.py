"""Gymnasium's own vector environments, which step as one batch."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from steadyrl.core.errors import SettingError
from steadyrl.core.saved_state import FINITE, Saved, check_limits
from steadyrl.core.state import restore
from steadyrl.envs.backends.batch import BatchBackend
from steadyrl.envs.encoding.spaces import encoders
from steadyrl.envs.encoding.step_buffer import StepBuffer
from steadyrl.envs.registration import explicit_time_limit, find_spec, unknown_keyword
from steadyrl.envs.settings import EnvSettings


class NativeBackend(BatchBackend):
    """A vector environment of Gymnasium, with one random generator for all N."""

    steps_in_background = False  # the step is computed in `_receive`

    def __init__(self, settings: EnvSettings, *, seed: int) -> None:
        self._env = env = _make(settings)
        try:
            encoder, decoder = encoders(
                settings.id, env.single_observation_space, env.single_action_space, settings.images
            )
        except BaseException:
            self.close()
            raise
        super().__init__(settings, encoder, decoder.spec, seed=seed)
        self._decode, self._action_dtype = decoder.decode, env.action_space.dtype
        self._to_do: NDArray[Any] = np.zeros(0)

    def close(self) -> None:
        """Close the environment; may be called twice and after a failure."""
        self._env.close()

    def _reset(self, seeds: list[int]) -> Any:
        return self._env.reset(seed=seeds[0])[0]

    def _send(self, action: NDArray[Any]) -> None:
        self._to_do = np.asarray(self._decode(action), self._action_dtype)

    def _receive(self, out: StepBuffer) -> None:
        self._fill(out, *self._env.step(self._to_do))

    def _save(self) -> dict[str, Any] | None:
        """Return the simulator's attributes if all are numbers, arrays or generators; else None."""
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

    def _load(self, saved: dict[str, Any]) -> bool:
        self._env.reset(seed=0)  # creates the generator whose state is restored
        env = self._env.unwrapped
        state = Saved(saved, "simulator")
        for name, current in vars(env).items():
            if not isinstance(current, gym.Space | gym.envs.registration.EnvSpec):
                try:
                    setattr(env, name, _taken(current, state.raw(name)))
                except ValueError as error:
                    raise ValueError(f"simulator.{name}: {error}") from None
        return True


def _taken(current: Any, saved: Any) -> Any:
    """Return the saved value after checking that it fits the current one."""
    if isinstance(current, np.ndarray) and hasattr(saved, "numpy"):
        # dtype and trailing shape may differ between a reset and a step.
        if saved.ndim != current.ndim or len(saved) != len(current):
            raise ValueError(f"saved with shape {list(saved.shape)}, not {list(current.shape)}")
        check_limits(saved, FINITE)
        return saved.numpy().copy()
    if current is None and (saved is None or hasattr(saved, "numpy")):
        return None if saved is None else saved.numpy().copy()
    return restore(current, saved)


def _make(settings: EnvSettings) -> gym.vector.VectorEnv[Any, Any, Any]:
    spec = find_spec(settings.id)
    if spec.vector_entry_point is None:
        raise SettingError(
            "backend", "native", f"{settings.id} has no vector environment of its own; use sync"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            env = gym.make_vec(
                spec,
                num_envs=settings.num_envs,
                vectorization_mode="vector_entry_point",
                **explicit_time_limit(settings.kwargs),
            )
        except TypeError as error:
            raise unknown_keyword(settings, error) or error from None
    if env.metadata.get("autoreset_mode") is not AutoresetMode.NEXT_STEP:
        env.close()
        raise SettingError(
            "backend", "native", f"{settings.id} does not reset on the step after an episode's end"
        )
    return env
