"""Backends whose simulator steps all environments in one call, and Gymnasium's own as `batch`."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from steadyrl.core.errors import SettingError
from steadyrl.core.saved_state import LARGEST_SEED, Saved
from steadyrl.envs.backends.single_env import (
    WarnOnce,
    close_quietly,
    episode_seed,
    raise_if_wrong,
    seeded_reset,
)
from steadyrl.envs.encoding.description import describe_spaces
from steadyrl.envs.encoding.simulator_state import copied_state, restore_state, saved_state
from steadyrl.envs.encoding.spaces import encoders
from steadyrl.envs.encoding.statistics import read_infos
from steadyrl.envs.encoding.step_buffer import StepBuffer, backend_kind
from steadyrl.envs.encoding.tensors import on_host
from steadyrl.envs.faults import Faults
from steadyrl.envs.registration import explicit_time_limit, find_spec, unknown_keyword
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import ActionSpec, Encoder, EnvSpec, Watch
from steadyrl.envs.vector import Backend


class BatchBackend(Backend):
    """N environments that are seeded only when all of them start.

    If the simulator's state cannot be saved, all environments reset when the state is restored.
    """

    steps_in_background = True

    def __init__(
        self,
        settings: EnvSettings,
        observations: gym.spaces.Space[Any],  # of one environment
        encoder: Encoder,
        action: ActionSpec,
        *,
        seed: int,
    ) -> None:
        n = settings.num_envs
        self._observations = observations
        self.spec = EnvSpec.of(settings, encoder, action)
        self.faults = Faults(settings.max_restarts, settings.role)
        self._write, self.limits = encoder.write, encoder.limits
        self._seed = seed
        self._starts = 0  # number of starts of all environments; each has its own seeds
        self._must_reset = False  # the next step resets all environments
        self._done = np.ones(n, np.bool_)  # [N] the next step resets
        self._warn = WarnOnce(settings.id)
        self.max_timeouts = n  # environments may be stepped sequentially
        if settings.checked:
            self._warn(encoder.remark)

    @abstractmethod
    def _reset(self, seeds: list[int]) -> Any:
        """Seed and reset all environments; return their observations."""

    @abstractmethod
    def _send(self, action: NDArray[Any]) -> None:
        """Start a step of all environments."""

    @abstractmethod
    def _receive(self, out: StepBuffer) -> None:
        """Wait for the step and call `_fill`."""

    def _save(self) -> dict[str, Any] | None:
        """Return the simulator's complete state; None: not supported."""
        return None

    def _load(self, saved: dict[str, Any]) -> bool:
        """Restore what `_save` returned; return whether that succeeded."""
        return False

    def start(self, out: StepBuffer) -> None:
        """Reset every environment and write the first frames into `out`."""
        envs = range(self.spec.num_envs)
        try:
            observations = self._reset([episode_seed(self._seed, e, self._starts) for e in envs])
            self._write(observations, out.obs, (self.spec.num_envs,))
        except BaseException as error:
            self.faults.give_up(self.spec.id, error)
        self._starts += 1
        self._must_reset = False
        self._done[:] = False
        out.set_all_reset()

    def watch(self, seen: Watch) -> None:
        """Call `seen` with the observations of all environments before they are encoded."""
        write = self._write

        def watched(observations: Any, out: NDArray[Any], lead: tuple[int, ...]) -> None:
            write(observations, out, lead)
            seen(observations, self._observations, None)

        self._write = watched

    def env_actions(self, action: NDArray[Any]) -> NDArray[Any]:
        """Return an agent's actions [N, …] as the environments get them."""
        return action

    def _check(self, action: NDArray[Any]) -> None:
        """Raise ValueError for invalid actions [N, …]."""

    def step_async(self, action: NDArray[Any], out: StepBuffer) -> None:
        """Start a step with actions [N, …]; its outcome goes into `out`."""
        if self._must_reset:
            return
        self._check(action)
        try:
            self._send(action)
        except BaseException as error:
            self.faults.give_up(self.spec.id, error)

    def step_wait(self, out: StepBuffer) -> None:
        """Wait for the step started last and fill `out`."""
        if self._must_reset:
            self.start(out)
            return
        try:
            self._receive(out)
        except BaseException as error:
            self.faults.give_up(self.spec.id, error)
        self.responses += 1

    def _fill(
        self,
        out: StepBuffer,
        observations: Any,
        reward: Any,
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        info: Mapping[str, Any],
    ) -> None:
        """Write a step; environments that were done before it have reset."""
        n = self.spec.num_envs
        columns = (("reward", reward), ("terminated", terminated), ("truncated", truncated))
        for name, column in columns:
            numbers = np.asarray(column)
            if numbers.shape != (n,):  # would broadcast to all environments
                raise ValueError(f"{name} has shape {numbers.shape}, not ({n},)")
            if numbers.dtype.kind not in "biuf":  # numbers are flags, too; text is always true
                raise ValueError(f"{name} is an array of {numbers.dtype}, expected numbers")
        self._write(observations, out.obs, (n,))
        np.logical_not(self._done, out=out.valid)
        out.reward[:] = 0.0
        np.copyto(out.reward, reward, where=out.valid, casting="unsafe")  # NaN of a reset is none
        np.logical_and(terminated, out.valid, out=out.terminated)
        np.logical_and(truncated, out.valid, out=out.truncated)
        np.logical_or(out.terminated, out.truncated, out=self._done)
        ended = np.count_nonzero(np.logical_or(terminated, truncated))
        if ended != np.count_nonzero(self._done):
            raise ValueError(
                "terminated or truncated is true in the step that began an episode: it comes after "
                "the step that ended the one before, and its flags must be false"
            )
        if self.spec.info_metrics and self._done.any():
            read_infos(info, self.spec.info_metrics, out.info, self._warn)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain values, with the simulator's if it can be saved."""
        idle = self._must_reset or not self._starts
        return {
            "backend_kind": "batch",
            "seed": self._seed,
            "starts": self._starts,
            "done": self._done,
            "simulator": None if idle else self._save(),
        }

    def restore(
        self, saved: dict[str, Any], past_actions: list[NDArray[Any] | None], out: StepBuffer
    ) -> NDArray[np.bool_]:
        """Restore a snapshot; without the simulator's state all environments reset."""
        # Of a snapshot made by a per-environment backend only the seed can be used.
        state, n = Saved(saved, "backend"), self.spec.num_envs
        known = backend_kind(state) == "batch"
        self._seed = state.whole("seed", 0, LARGEST_SEED)
        self._starts = state.whole("starts") if known else 1
        self._done[:] = state.tensor("done", (n,), "bool").numpy() if known else True
        snapshot = state.raw("simulator") if known else None
        self._must_reset = snapshot is None or not self._load(snapshot)
        return np.full(self.spec.num_envs, not self._must_reset)

    def force_reset(self, env: int) -> None:
        """Make the next step of all environments a reset: one alone cannot be reset."""
        self._must_reset = True


class VectorEntryPoint(BatchBackend):
    """Backend `batch`: the Gymnasium vector environment registered as `vector_entry_point`.

    All N environments draw from one random generator.
    """

    steps_in_background = False  # the step is computed in `_receive`

    def __init__(self, settings: EnvSettings, *, seed: int) -> None:
        self._env = env = make_batch(settings)
        observations, actions = env.single_observation_space, env.single_action_space
        try:
            encoder, decoder = encoders(settings.id, observations, actions, settings.images)
        except BaseException:
            close_quietly(env, settings.id)
            raise
        super().__init__(settings, observations, encoder, decoder.spec, seed=seed)
        described = describe_spaces(observations, actions, settings.images.axes)
        self.spec = replace(self.spec, spaces=described)
        self._decode, self._action_dtype = decoder.decode, env.action_space.dtype
        self._action: NDArray[Any] = np.zeros(0)
        self._checked = settings.checked
        self._fresh: dict[str, Any] = {}  # the simulator's attributes after its last reset

    def close(self) -> None:
        """Close the environment; may be called twice and after a failure."""
        close_quietly(self._env, self.spec.id)

    def _reset(self, seeds: list[int]) -> Any:
        try:
            observations, _ = seeded_reset(self._env, seeds[0])
        except (TypeError, ValueError) as error:
            raise_if_wrong("reset", error)
            raise
        self._fresh = copied_state(self._env)
        return on_host(observations)

    def env_actions(self, action: NDArray[Any]) -> NDArray[Any]:
        """Return an agent's actions [N, …] as the environments get them."""
        return np.asarray(self._decode(action), self._action_dtype)

    def _send(self, action: NDArray[Any]) -> None:
        self._action = self.env_actions(action)

    def _receive(self, out: StepBuffer) -> None:
        try:
            obs, reward, terminated, truncated, info = self._env.step(self._action)
        except (TypeError, ValueError) as error:
            raise_if_wrong("step", error)
            raise
        obs, reward, terminated, truncated = on_host((obs, reward, terminated, truncated))
        self._fill(out, obs, reward, terminated, truncated, info)

    def _save(self) -> dict[str, Any] | None:
        try:
            return saved_state(self._env, self._fresh)
        except (TypeError, ValueError) as error:
            if self._checked:
                self._warn(f"its state cannot be saved, a resumed run starts new episodes: {error}")
            return None

    def _load(self, saved: dict[str, Any]) -> bool:
        self._reset([0])  # creates the generator whose state is restored
        restore_state(self._env, self._fresh, saved)
        return True


def make_batch(settings: EnvSettings) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Make the vector environment that an id is registered with."""
    spec = find_spec(settings.id)
    if spec.vector_entry_point is None:
        reason = f"{settings.id} has no vector environment of its own; use sync"
        raise SettingError("backend", "batch", reason)
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
        close_quietly(env, settings.id)
        reason = (
            f"{settings.id} does not reset on the step after an episode's end: "
            'metadata["autoreset_mode"] is not AutoresetMode.NEXT_STEP'
        )
        raise SettingError("backend", "batch", reason)
    return env
