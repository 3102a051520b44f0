"""Check an environment against Gymnasium's interface on its first steps, then get out of the way.

What it does wrong but we can live with is remarked in one line; what nobody can is an error that
building it anew would not mend.
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
from gymnasium.utils.passive_env_checker import (
    env_reset_passive_checker,
    env_step_passive_checker,
)
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from envs.minatar import FreshStickyAction
from envs.types import EnvironmentFailedError
from memory.errors import describe, one_line

log = logging.getLogger("steadyrl")
Say = Callable[[str], None]

FIRST_STEPS = 10
MOST_REMARKS = 20  # a text with a changing number in it would be a new one every time
OUTER = (OrderEnforcing, TimeLimit, FreshStickyAction)  # what making an environment adds
FORM = "(observation, reward, terminated, truncated, info)"


class Remarks:
    """Write each remark about an environment into the log once."""

    def __init__(self, env_id: str) -> None:
        self._env_id = env_id
        self._said: set[str] = set()

    def __call__(self, remark: str) -> None:
        """Say it, unless it is empty, was said, or too much was said."""
        if remark and remark not in self._said and len(self._said) < MOST_REMARKS:
            self._said.add(remark)
            log.warning("%s: %s", self._env_id, remark)


def check_first_steps(env: gym.Env[Any, Any], say: Say) -> gym.Env[Any, Any]:
    """Let the first steps be checked, right around what the user wrote, below Gymnasium's own."""
    outer: Any = None
    inner = env
    while type(inner) in OUTER:
        outer, inner = inner, inner.env  # type: ignore[attr-defined]
    if outer is None:
        return _FirstSteps(inner, say, None)
    outer.env = _FirstSteps(inner, say, outer)
    return env


class _FirstSteps(gym.Wrapper[Any, Any, Any, Any]):
    """Look at what the first calls return; then `outer` calls the environment itself."""

    def __init__(self, env: gym.Env[Any, Any], say: Say, outer: Any) -> None:
        super().__init__(env)
        self._say, self._outer = say, outer
        self._left = FIRST_STEPS

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(**kwargs)
        if self._left > 0:
            if not isinstance(result, tuple) or len(result) != 2:
                raise EnvironmentFailedError(
                    f"reset() returned {_form(result)}, not (observation, info)"
                )

            @functools.wraps(self.env.reset)
            def reset(**_: Any) -> Any:
                return result

            self._check(env_reset_passive_checker, reset=reset)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        if self._left > 0:
            if not isinstance(result, tuple) or len(result) != 5:
                raise EnvironmentFailedError(f"step() returned {_form(result)}, not {FORM}")
            self._check(env_step_passive_checker, action, step=lambda _: result)
            self._left -= 1
        elif self._outer is not None:
            self._outer.env = self.env
        return result

    def _check(self, checker: Callable[..., Any], *arguments: Any, **methods: Any) -> None:
        """Show a checker what was returned, without calling the environment again."""
        shown = SimpleNamespace(observation_space=self.observation_space, **methods)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                checker(shown, *arguments)
            except AssertionError as error:
                raise EnvironmentFailedError(one_line(str(error))) from None
            except Exception as error:  # the numbers themselves are judged elsewhere
                self._say(f"cannot be checked: {describe(error)}")
        for warning in caught:
            self._say(_plain(str(warning.message)))


def _form(result: Any) -> str:
    kind = type(result).__name__
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {kind}"


def _plain(text: str) -> str:
    """Take Gymnasium's colours and its label off."""
    return one_line(re.sub(r"\x1b\[\d*m", "", text)).removeprefix("WARN: ")
