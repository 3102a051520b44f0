"""Atari games through ALE's own vector environment, whose threads work while we learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.batch import Simulator, fill
from envs.images import image_encoder
from envs.making import ATARI, find_spec, unknown_keyword
from envs.row import Ends, Row
from envs.settings import EnvSettings
from envs.types import DiscreteActions, Encoder, EnvSpec
from memory.errors import SettingError

SEED_LIMIT = 2**31 - 1  # a larger seed turns negative in C++ and is then ignored
# What the timeline decides, so that nobody else may.
OURS = {
    "stack_num": "use env.frame_stack",
    "reward_clipping": "the learner clips rewards, the score stays raw",
    "life_loss_info": "use episodic_life",
    "autoreset_mode": "environments reset on the step after an episode's end",
    "batch_size": "every row holds all environments",
    "continuous": "actions are the buttons",
}


class AtariSimulator(Simulator):
    """N copies of a game: one 84x84 frame a row, raw scores, lives as episodes where asked for.

    ALE's `episodic_life` starts a whole new game at every lost life; here the game goes on, as in
    the published protocols: the row after a lost life presses FIRE (or nothing), is not valid, and
    its reward counts for the score only.
    """

    def __init__(self, settings: EnvSettings, *, num_envs: int) -> None:
        kwargs = dict(settings.kwargs)
        self._lives_are_episodes = bool(kwargs.pop("episodic_life", False))
        self.env = _make(settings, kwargs, num_envs)
        encoder = _encoder(self.env.single_observation_space)
        self._encode = encoder.write
        actions = DiscreteActions(int(self.env.single_action_space.n))
        self.spec = EnvSpec.of(settings.id, num_envs, encoder, actions)
        buttons = [action.name for action in self.env.ale.get_action_set()]
        fire = kwargs.get("use_fire_reset", True) and "FIRE" in buttons
        self._after_life = buttons.index("FIRE") if fire else buttons.index("NOOP")
        self._choices = len(buttons)
        self._lives = np.zeros(num_envs, np.int32)
        self._new_life = np.zeros(num_envs, np.bool_)  # whose next row goes on after a lost life

    def close(self) -> None:
        """End the threads; safe to call twice and after a failure."""
        self.env = None

    def start(self, row: Row, seeds: list[int]) -> None:
        """Seed and reset all games; write their frames."""
        seeds = [seed % SEED_LIMIT for seed in seeds]
        observations, info = self.env.reset(seed=np.array(seeds))
        self._write(observations, row)
        self._lives[:] = info["lives"]
        self._new_life[:] = False

    def send(self, action: NDArray[Any]) -> None:
        """Begin a step of all games."""
        buttons = np.where(self._new_life, self._after_life, action)
        if buttons.min() < 0 or buttons.max() >= self._choices:  # ALE's threads would wait forever
            raise ValueError(f"actions {action.tolist()} lie outside 0…{self._choices - 1}")
        self.env.send(buttons)

    def receive(self, row: Row, done: NDArray[np.bool_]) -> None:
        """Finish the step and write the row, whose scores go by games and not by lives."""
        observations, reward, game_over, time_up, info = self.env.recv()
        self._write(observations, row)
        lives, begun, new_life = info["lives"], done.copy(), self._new_life
        fill(row, done, reward, game_over, time_up)
        row.ends = Ends(reward, begun=begun, ended=done.copy(), skipped=new_life.copy())
        row.valid &= ~new_life
        for array in (row.reward, row.terminated, row.truncated):
            array[new_life] = 0
        if self._lives_are_episodes:
            self._new_life = (lives < self._lives) & row.valid & ~done
            row.terminated |= self._new_life
        self._lives[:] = lives

    def _write(self, observations: NDArray[np.uint8], row: Row) -> None:
        self._encode(observations[:, 0], row.obs, (self.spec.num_envs,))


def _make(settings: EnvSettings, kwargs: dict[str, Any], num_envs: int) -> Any:
    spec = find_spec(settings.id)
    if spec.entry_point != ATARI:
        raise SettingError("backend", settings.backend, f"{settings.id} is no Atari game")
    for key, reason in OURS.items():
        if key in kwargs:
            raise SettingError(f"kwargs.{key}", kwargs[key], f"cannot be set: {reason}")
    from ale_py.vector_env import AtariVectorEnv as AleVectorEnv

    try:
        return AleVectorEnv(
            spec.kwargs["game"], num_envs, stack_num=1, reward_clipping=False, **kwargs
        )
    except TypeError as error:
        if "incompatible function arguments" in str(error):  # and then all of C++'s signature
            reason = "one of the values is not of the kind that ALE takes"
            raise SettingError("kwargs", settings.kwargs, reason) from None
        raise unknown_keyword(settings, error) or error from None


def _encoder(stacks: spaces.Box) -> Encoder:
    """Return the encoder of one frame [H, W] or [H, W, 3] of the stacks [k, H, W, …]."""
    return image_encoder(spaces.Box(0, 255, stacks.shape[1:], np.uint8))


def probe_atari(settings: EnvSettings) -> EnvSpec:
    """Say what the game offers, with one copy of it on one thread."""
    kwargs = {**settings.kwargs, "num_threads": 1}
    simulator = AtariSimulator(replace(settings, kwargs=kwargs), num_envs=1)
    simulator.close()
    return simulator.spec
