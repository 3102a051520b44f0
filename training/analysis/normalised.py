"""Human-normalised scores, and their interquartile mean over runs and games, as in rliable.

Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from steadyrl.core.errors import SettingError, did_you_mean
from steadyrl.core.safe_parsing import read_yaml
from steadyrl.training.analysis.estimates import (
    RESAMPLES,
    TAILS,
    Array,
    Interval,
    interquartile_mean,
)
from steadyrl.training.evaluation.t_distribution import NORMAL, t_quantile

SCORES = {"atari": Path(__file__).parent / "atari_scores.yaml"}  # [random, human] by game
# Pong in ALE/Pong-v5, ale_py:ALE/Pong-v5, Pong-v4, Pong-ram-v0 and PongNoFrameskip-v4.
GAME = re.compile(r"(?:[\w.]+:)?(?:ALE/)?(\w+?)(?:-ram)?(?:NoFrameskip|Deterministic)?(?:-v\d+)?")


class Normaliser:
    """Scores as fractions of the way from a random policy (0) to a human (1)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ends: Mapping[str, tuple[float, float]] = read_yaml(SCORES[name])

    def game(self, env: str) -> str:
        """Return the game of an environment; SettingError for one that is not known."""
        match = GAME.fullmatch(env)
        game = match[1] if match else env
        if game not in self._ends:
            reason = f"no random and human score of {env or 'an unnamed environment'}"
            hint = did_you_mean(game, self._ends) or "compare runs of Atari games only"
            raise SettingError("--normalise", self._name, f"{reason}; {hint}")
        return game

    def ends(self, game: str) -> tuple[float, float]:
        """Return the scores of a random policy and of a human."""
        random, human = self._ends[game]
        return random, human

    def __call__(self, env: str, scores: Array) -> Array:
        """Return an environment's scores normalised."""
        random, human = self.ends(self.game(env))
        return (scores - random) / (human - random)


def iqm(games: Sequence[Array]) -> tuple[float, Interval]:
    """Return the interquartile mean over all runs of all games, and its bootstrap interval.

    `games`: normalised scores [R] of each game. Runs are resampled within each game. As in
    `estimates.interval`, the interval is widened for few runs; one run of each game has none.
    """
    pooled = np.concatenate(games)
    estimate = interquartile_mean(pooled)
    freedom = len(pooled) - len(games)
    if freedom == 0:
        return float(estimate), Interval(estimate, estimate)
    random = np.random.default_rng(0)
    chosen = [each[random.integers(0, len(each), (RESAMPLES, len(each)))] for each in games]
    low, high = np.quantile(interquartile_mean(np.concatenate(chosen, axis=1).T), TAILS)
    factor = t_quantile(freedom) / NORMAL * math.sqrt(len(pooled) / freedom)
    return float(estimate), Interval(
        estimate - factor * (estimate - low), estimate + factor * (high - estimate)
    )
