"""One environment on the timeline: seeded episodes, encoded frames, decoded actions."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

import gymnasium as gym
from numpy.typing import NDArray

from envs.atari import ENTRY_POINT as ATARI
from envs.checking import Say, check_first_steps
from envs.making import make_env
from envs.rows import Rows
from envs.seeding import episode_seed
from envs.settings import EnvSettings
from envs.spaces import encoders
from envs.types import EnvSpec
from memory.errors import SettingError

LOG = logging.getLogger("steadyrl")
NOT_ATARI = "Atari games run with ale or envpool"
TRIAL_STEPS = 20
TRIAL_SECONDS = 0.1


class EnvSlot:
    """One environment of N: it can be built, started, stepped, replayed and built again."""

    def __init__(
        self, settings: EnvSettings, *, seed: int, index: int, say: Say | None = None
    ) -> None:
        self.seed = seed
        self.index = index
        self.episode = -1  # the episode under way
        self.over = True  # the next row is a reset
        self._settings = settings
        self._say = say  # takes remarks on its first steps, which are then checked
        self._env: gym.Env[Any, Any] | None = None

    def build(self) -> None:
        """Make the environment, after closing the one there was."""
        self.close()
        env = make_env(self._settings)
        if env.spec is not None and env.spec.entry_point == ATARI:
            raise SettingError("backend", self._settings.backend, NOT_ATARI)
        self._env = env if self._say is None else check_first_steps(env, self._say)
        self.encoder, self.decoder = encoders(
            self._settings.id, env.observation_space, env.action_space
        )
        self.spaces = f"{env.observation_space} and {env.action_space}"
        if self._say is not None:
            self._say(self.encoder.remark)
        self._step = self._env.step
        self._write = self.encoder.write
        env.action_space.seed(0)
        self._sample = env.action_space.sample

    def spec(self, num_envs: int) -> EnvSpec:
        """Say what the environment offers."""
        return EnvSpec(
            id=self._settings.id,
            num_envs=num_envs,
            frame_shape=self.encoder.shape,
            dtype=self.encoder.dtype,
            frame_stack=1,
            action=self.decoder.spec,
        )

    def any_action(self) -> Any:
        """Return an action that the environment takes."""
        return self._sample()

    def cut(self, episode: int) -> None:
        """Let the next row be a reset that starts the episode after this one."""
        self.episode = episode
        self.over = True

    def start(self, frame: NDArray[Any]) -> None:
        """Begin the next episode and write its first frame."""
        if self._env is None:
            raise RuntimeError("the environment is closed")
        self.episode += 1
        seed = episode_seed(self.seed, self.index, self.episode)
        observation, _ = self._env.reset(seed=seed)
        self._write(observation, frame)
        self.over = False

    def advance(self, action: Any, rows: Rows) -> None:
        """Write this environment's next row: a step with a decoded action, or a reset."""
        index = self.index
        frame = rows.frames[index]
        if self.over:
            self.start(frame)
            rows.set_reset(index)
            return
        reward: Any
        observation, reward, terminated, truncated, _ = self._step(action)
        self._write(observation, frame)
        if terminated or truncated:
            self.over = True
        try:
            rows.reward[index] = reward + 0.0  # of text NumPy would make a number, of None a NaN
        except (TypeError, ValueError):
            kind = type(reward).__name__
            raise TypeError(f"its reward is {reward!r}, a {kind}, not a number") from None
        rows.terminated[index] = terminated
        rows.truncated[index] = truncated
        rows.valid[index] = True

    def replay(self, actions: NDArray[Any], frame: NDArray[Any]) -> None:
        """Do known actions [T, …] of an episode again and write the frame they lead to."""
        for action in self.decoder.decode(actions):
            if self.over:
                raise RuntimeError("the episode ended earlier than it did before")
            observation, _, terminated, truncated, _ = self._step(action)
            self._write(observation, frame)
            self.over = bool(terminated or truncated)

    def close(self) -> None:
        """Close the environment; what it raises while closing changes nothing any more."""
        env, self._env = self._env, None
        if env is not None:
            try:
                env.close()
            except KeyboardInterrupt:
                raise
            except BaseException:  # a broken environment may not even close
                LOG.debug("environment %d did not close cleanly", self.index, exc_info=True)


def step_time(slot: EnvSlot) -> bytes:
    """Measure what one step of a built environment takes, in seconds."""
    times: list[float] = []
    rows = Rows(slot.spec(num_envs=1))
    slot.index = 0
    end = time.perf_counter() + TRIAL_SECONDS
    while len(times) < TRIAL_STEPS and (not times or time.perf_counter() < end):
        resets = slot.over
        begin = time.perf_counter()
        slot.advance(slot.any_action(), rows)
        if not resets:
            times.append(time.perf_counter() - begin)
    return repr(statistics.median(times)).encode()


def probe_slot(settings: EnvSettings) -> EnvSpec:
    """Say what one environment offers, by making it."""
    slot = EnvSlot(settings, seed=0, index=0)
    try:
        slot.build()
        return slot.spec(num_envs=1)
    finally:
        slot.close()
