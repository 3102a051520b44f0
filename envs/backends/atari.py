"""Atari games through ALE's vector environment, whose threads step while the agent learns."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.envs.backends.batch import BatchBackend
from steadyrl.envs.encoding.spaces import observation_encoder
from steadyrl.envs.encoding.step_buffer import ScoreBoundaries, StepBuffer
from steadyrl.envs.rendering.atari import SEED_LIMIT, ale_kwargs, button_after_life, make_ale
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import DiscreteActions


class AtariBackend(BatchBackend):
    """N copies of a game: one 84x84 frame per step, raw scores, optionally lives as episodes.

    ALE's `episodic_life` starts a new game at every lost life. Here the game continues, as in the
    published protocols: the step after a lost life presses FIRE (or NOOP), is invalid, and its
    reward counts towards the score only. In evaluation it presses the same, but is a step of the
    episode, which is the whole game.
    """

    def __init__(self, settings: EnvSettings, *, seed: int) -> None:
        kwargs = ale_kwargs(settings)
        self._lives_are_episodes = bool(kwargs.pop("episodic_life", False))
        self.env = make_ale(settings, kwargs, settings.num_envs)
        # One frame [H, W] or [H, W, 3] of the stacks [1, H, W, …].
        shape = self.env.single_observation_space.shape[1:]
        actions = DiscreteActions(int(self.env.single_action_space.n))
        frames = spaces.Box(0, 255, shape, np.uint8)
        encoder = observation_encoder(frames, settings.images)
        super().__init__(settings, frames, encoder, actions, seed=seed)
        buttons = [action.name for action in self.env.ale.get_action_set()]
        self._after_life = button_after_life(buttons, kwargs)
        self._choices = len(buttons)
        self._lives = np.zeros(settings.num_envs, np.int32)
        self._continues = self._lives_are_episodes or settings.continues_after_life
        # [N] the next step continues the game after a lost life
        self._new_life = np.zeros(settings.num_envs, np.bool_)

    def close(self) -> None:
        """Stop the threads; may be called twice and after a failure."""
        self.env = None

    def _reset(self, seeds: list[int]) -> Any:
        observations, info = self.env.reset(seed=np.array(seeds) % SEED_LIMIT)
        self._lives[:] = info["lives"]
        self._new_life[:] = False
        return observations[:, 0]

    def _check(self, action: NDArray[Any]) -> None:
        if action.min() < 0 or action.max() >= self._choices:  # ALE's threads would hang
            raise ValueError(f"actions {action.tolist()} lie outside 0…{self._choices - 1}")

    def env_actions(self, action: NDArray[Any]) -> NDArray[Any]:
        """Return an agent's actions [N] as the games get them, also after a lost life."""
        return np.where(self._new_life, self._after_life, action)

    def _send(self, action: NDArray[Any]) -> None:
        self.env.send(self.env_actions(action))

    def _receive(self, out: StepBuffer) -> None:
        """Wait for the step and fill `out`; scores are those of games, not of lives."""
        observations, reward, game_over, time_up, info = self.env.recv()
        lives, begun = info["lives"], self._done.copy()
        self._fill(out, observations[:, 0], reward, game_over, time_up, info)
        skipped = self._new_life & self._lives_are_episodes
        out.score_boundaries = ScoreBoundaries(
            reward, begun=begun, ended=self._done.copy(), skipped=skipped
        )
        out.valid &= ~skipped
        for array in (out.reward, out.terminated, out.truncated):
            array[skipped] = 0
        lost = (lives < self._lives) & out.valid
        if self._continues:
            self._new_life = lost & ~self._done
        if self._lives_are_episodes:
            out.terminated |= lost  # also in the step in which the time is up
        self._lives[:] = lives
