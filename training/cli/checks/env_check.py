"""Checks of one environment: Gymnasium's, and what training needs beyond them.

Each takes the settings and yields (level, text); `isolated.py` runs it in a process of its own.
"""

from __future__ import annotations

import copy
import math
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray

from steadyrl.core.errors import SettingError, one_line
from steadyrl.envs.backends.single_env import (
    close_quietly,
    describe_wrong_reward,
    images_of,
    strip_style,
)
from steadyrl.envs.encoding.first_reset import same
from steadyrl.envs.encoding.masks import Masked, find_masks, read_masks
from steadyrl.envs.encoding.spaces import encoders, observation_encoder, parts_of
from steadyrl.envs.encoding.step_buffer import action_layout
from steadyrl.envs.factory import build_env, probe
from steadyrl.envs.registration import make_env
from steadyrl.envs.settings import EnvSettings, ImageSettings
from steadyrl.envs.types import (
    BoxActions,
    DiscreteActions,
    EnvSpec,
    MultiBinaryActions,
    MultiDiscreteActions,
)
from steadyrl.training.cli.checks.isolated import ABSENT, FAULT, NOTE, OK
from steadyrl.training.cli.checks.outside import Observed

STEPS, SECONDS = 2_000, 5.0  # of random play
COMPARED = 300  # steps of an episode that two copies play
SEED = 7
TIMED = 0.3  # seconds
MOST_NOTES = 6
# Gymnasium's advice for other trainers, and about the wrapper around an environment that is fine.
UNINTERESTING = (
    "is different from the unwrapped version",
    "For Box action spaces, we recommend",
    "This is probably too",  # low or high: bounds of vectors are not used
)
OUTSIDE = "is not within the observation space"
REUSES_DATA = re.compile(r"The (observations|infos) returned by .* share an object")


class Outcome(NamedTuple):
    """What reset() or step() returned."""

    observation: Any
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False


class Played:
    """An environment with masks applied, and its random actions."""

    def __init__(self, settings: EnvSettings) -> None:
        made = make_env(settings)
        masks = find_masks(made, settings)
        self.env: gym.Env[Any, Any] = made if masks is None else masks
        self.masked, self.images = isinstance(self.env, Masked), images_of(made, settings)
        made.action_space.seed(SEED)
        self.sample = made.action_space.sample if masks is None else masks.sample_action

    def observation(self, outcome: Outcome) -> Any:
        """Return an outcome's observation without its mask."""
        return outcome.observation[0] if self.masked else outcome.observation

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def reset(self, seed: int | None = None) -> Outcome:
        """Start an episode."""
        return Outcome(copy.deepcopy(self.env.reset(seed=seed)[0]))

    def step(self, action: Any) -> Outcome:
        """Take a step with an action as the environment takes it."""
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return Outcome(copy.deepcopy(observation), reward, terminated, truncated)


def gymnasium_checks(settings: EnvSettings) -> Iterator[tuple[str, str]]:
    """Run Gymnasium's own checker."""
    with ExitStack() as closed:
        env = make_env(settings)
        closed.callback(close_quietly, env, "the environment")
        if find_masks(env, settings) is not None:
            yield NOTE, "Gymnasium's checker was left out: it takes actions that the mask forbids"
            return
        yield from _gymnasium_findings(env if settings.wrappers else env.unwrapped)


def _with_plain_flags(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Have `step` return Python's booleans: the checker takes NumPy's False for a truncation."""
    step = env.step

    def plain(action: Any) -> Any:
        result = step(action)
        if not isinstance(result, tuple):
            return result
        return tuple(bool(part) if isinstance(part, np.bool_) else part for part in result)

    env.step = plain  # type: ignore[method-assign]
    return env


def _gymnasium_findings(env: gym.Env[Any, Any]) -> Iterator[tuple[str, str]]:
    failed = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(_with_plain_flags(env), skip_render_check=True)
        except AssertionError as error:
            failed = one_line(str(error)) or "an assertion of its checker failed"
        except ValueError as error:
            if "RecordConstructorArgs" not in str(error):
                raise
            yield NOTE, "Gymnasium's checker was left out: it cannot recreate a wrapper of yours"
            return
    if shared := REUSES_DATA.match(failed):  # after these it checks only close()
        yield NOTE, f"returns the same object in several {shared[1]}: training copies what it needs"
        failed = ""
    if OUTSIDE in failed:  # of the first reset, before its other checks; `episodes` looks at all
        yield NOTE, f"{failed} The rest of Gymnasium's checks was left out"
        return
    if failed:
        yield FAULT, failed
    texts = dict.fromkeys(strip_style(str(warning.message)) for warning in caught)
    said = [text for text in texts if not any(part in text for part in UNINTERESTING)]
    yield from ((NOTE, text) for text in said[:MOST_NOTES])
    if not failed:
        yield OK, f"passes Gymnasium's checker{' otherwise' if shared else ''}"


def timed_steps(most: int) -> Iterator[int]:
    """Count steps from 1, for SECONDS at most after the first one, which may compile."""
    yield 1
    end = time.monotonic() + SECONDS
    for step in range(2, most + 1):
        if time.monotonic() >= end:
            return
        yield step


def episodes(settings: EnvSettings) -> Iterator[tuple[str, str]]:
    """Play random episodes: rewards and observations are valid, episodes end and start again."""
    returns, lengths, score, length, steps = [], [], 0.0, 0, 0
    accepted = ""
    with closing(Played(settings)) as played:
        seen = Observed(played.env.observation_space, played.images)
        outcome = played.reset(SEED)
        for steps in timed_steps(STEPS):
            if not length:
                seen.look(played.observation(outcome))
            outcome = played.step(played.sample())
            length += 1
            wrong = _wrong_types(outcome)
            if wrong:
                yield FAULT, f"step {steps}: {wrong}"
                return
            if not accepted and (flag := _no_boolean(outcome)):
                accepted = f"step {steps}: {flag}"
            seen.look(played.observation(outcome))
            score += float(outcome.reward)
            if outcome.terminated or outcome.truncated:
                returns.append(score)
                lengths.append(length)
                score, length = 0.0, 0
                outcome = played.reset(SEED + len(returns))  # training seeds each episode
    if accepted:
        yield NOTE, f"{accepted} (training takes it)"
    yield from seen.findings()
    if not returns:
        many = "1 random step" if steps == 1 else f"{steps:,} random steps"
        none = f"no episode ended within {many}"
        limit = "give it a time limit if it has none: env.kwargs.max_episode_steps=1000"
        slow = f"{none}, as many as it makes in {SECONDS:g} s"
        yield NOTE, f"{none}: {limit}" if steps == STEPS else slow
        return
    yield OK, summary(lengths, returns)


def summary(lengths: Sequence[int], returns: Sequence[float]) -> str:
    """Return one line about random episodes."""
    return (
        f"{len(returns)} random episodes of {np.mean(lengths):,.0f} steps, {sum(lengths):,} in all,"
        f" return {np.mean(returns):,.4g} (from {min(returns):,.4g} to {max(returns):,.4g})"
    )


def _wrong_types(outcome: Outcome) -> str:
    """Return what is wrong with an outcome's numbers; "" if nothing is."""
    reward = outcome.reward
    if getattr(reward, "ndim", 0):  # float() would convert a tensor of one element
        return describe_wrong_reward(reward)
    try:
        number = float(reward)
    except (TypeError, ValueError):
        return describe_wrong_reward(reward)
    if not math.isfinite(number):
        return f"its reward is {number}"
    if not all(np.isfinite(part).all() for part in _numbers(outcome.observation)):
        return "its observation holds values that are not finite"
    for name in ("terminated", "truncated"):
        if not _has_truth(getattr(outcome, name)):
            return _no_boolean(outcome, name)
    return ""


def _has_truth(flag: Any) -> bool:
    """Return whether training takes a flag: a text is always true, several numbers are neither."""
    try:
        bool(flag)
    except (TypeError, ValueError, RuntimeError):  # the last one is torch's
        return False
    return not isinstance(flag, str)


def _no_boolean(outcome: Outcome, *names: str) -> str:
    """Return which of these flags is no boolean; "" if all are."""
    flags = {name: getattr(outcome, name) for name in names or ("terminated", "truncated")}
    return next(
        (
            f"{name} is {flag!r}, a {type(flag).__name__}, not a bool"
            for name, flag in flags.items()
            if not isinstance(flag, bool | np.bool_)
        ),
        "",
    )


def _numbers(observation: Any) -> Iterator[NDArray[Any]]:
    if isinstance(observation, dict):
        for part in observation.values():
            yield from _numbers(part)
    elif isinstance(observation, tuple):
        for part in observation:
            yield from _numbers(part)
    else:
        array = np.asarray(observation)
        if array.dtype.kind in "fiub":
            yield array


def determinism(settings: EnvSettings) -> Iterator[tuple[str, str]]:
    """Compare copies of the environment with the same seeds and actions."""
    with closing(Played(settings)) as first:
        actions, outcomes = _record(first, first.reset(SEED))
        again = first.reset(SEED + 1), *_record(first, None)
    wrong = _compare(settings, SEED, actions, outcomes)
    if wrong:
        yield FAULT, f"{wrong}: runs cannot be repeated, nor resumed within an episode"
        return
    compared = "step" if len(actions) == 1 else "steps"
    yield (
        OK,
        f"the same seed and actions give the same episode ({len(actions):,} {compared} compared)",
    )
    begin, later_actions, later = again
    wrong = _compare(settings, SEED + 1, later_actions, [begin, *later])
    if wrong:
        yield FAULT, f"an episode depends on the one before it ({wrong}): it cannot be resumed"
    else:
        yield OK, "episodes can be replayed from their seed: resumed runs continue them exactly"


def _record(played: Played, begin: Outcome | None) -> tuple[list[Any], list[Outcome]]:
    """Play an episode; return its actions and outcomes, with `begin` first."""
    actions: list[Any] = []
    outcomes = [] if begin is None else [begin]
    for _ in timed_steps(COMPARED):
        actions.append(copy.deepcopy(played.sample()))
        outcomes.append(played.step(actions[-1]))
        if outcomes[-1].terminated or outcomes[-1].truncated:
            break
    return actions, outcomes


def _compare(settings: EnvSettings, seed: int, actions: list[Any], outcomes: list[Outcome]) -> str:
    """Play the actions in a new copy; return where its outcomes differ, "" if nowhere."""
    with closing(Played(settings)) as played:
        for step, expected in enumerate(outcomes):
            found = played.step(actions[step - 1]) if step else played.reset(seed)
            for name in Outcome._fields:
                if not same(getattr(expected, name), getattr(found, name)):
                    return f"its {name} differs at step {step} with the same seed and actions"
    return ""


def encoding(settings: EnvSettings) -> Iterator[tuple[str, str]]:
    """Describe what networks and replay see of an observation, and the actions."""
    env = make_env(settings)
    with closing(env):
        masks = find_masks(env, settings)
        space = env.observation_space if masks is None else masks.observation_space
        images = images_of(env, settings)
        beside_mask = masks is not None and masks.splits_observation
        encoder, _ = encoders(settings.id, space, env.action_space, images, beside_mask=beside_mask)
    yield from describe_encoding(probe(settings), space, images)
    if encoder.remark:
        yield NOTE, encoder.remark


def describe_encoding(
    spec: EnvSpec, space: spaces.Space[Any] | None, images: ImageSettings
) -> Iterator[tuple[str, str]]:
    """Yield one line about observations, and one about actions."""
    shape = spec.unmasked.frame_shape
    if len(shape) == 3:
        channels, height, width = shape
        many = "1 channel" if channels == 1 else f"{channels} channels"
        what = f"an image of {many} of {height}x{width}, bytes"
    else:
        what = f"{shape[0]} numbers, {spec.dtype}"
    if isinstance(space, spaces.Box):
        what = f"Box{space.shape} of {space.dtype}, read as {what}"
    elif isinstance(space, spaces.Dict | spaces.Tuple) and len(shape) == 1:
        parts = parts_of(space)
        widths = ((name, observation_encoder(part, images).shape[0]) for name, part in parts)
        what += f": {', '.join(f'{name} {width}' for name, width in widths)}"
    elif space is not None:
        what = f"{space}, read as {what}"
    if spec.frame_stack > 1:
        what += f", {spec.frame_stack} frames stacked"
    nbytes = math.prod(spec.frame_shape) * np.dtype(spec.dtype).itemsize
    yield OK, f"{what}; {nbytes:,} bytes an observation in the replay"
    kind = type(spec.action).__name__.removesuffix("Actions")
    sizes = ", ".join(f"{name} {value}" for name, value in vars(spec.action).items())
    masked = "; with action masks" if spec.mask else ""
    yield OK, f"{kind} actions ({sizes}){masked}"


def speed(settings: EnvSettings) -> Iterator[tuple[str, str]]:
    """Measure the steps per second of a backend, or say why it cannot be used."""
    try:
        env = build_env(settings, seed=SEED)
    except SettingError as error:
        yield ABSENT, error.reason
        return
    generator = np.random.default_rng(SEED)
    with closing(env):
        env.reset()
        env.step(random_actions(generator, env.observation, env.spec))  # compiles
        steps, begin = 0, time.perf_counter()
        while (seconds := time.perf_counter() - begin) < TIMED:
            env.step(random_actions(generator, env.observation, env.spec))
            steps += settings.num_envs
        yield OK, f"{steps / seconds:,.0f} steps/s"


def finite_bounds(
    low: Sequence[float], high: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bounds with 1 beyond the other one in place of an infinite one; -1 and 1 for both."""
    below, above = np.asarray(low), np.asarray(high)
    is_low, is_high = np.isfinite(below), np.isfinite(above)
    return (
        np.where(is_low, below, np.where(is_high, above, 0.0) - 1),
        np.where(is_high, above, np.where(is_low, below, 0.0) + 1),
    )


def random_actions(
    generator: np.random.Generator, obs: NDArray[Any], spec: EnvSpec
) -> NDArray[Any]:
    """Return actions [N, …] as agents send them; with masks the first allowed one."""
    action, n = spec.action, spec.num_envs
    dtype, shape = action_layout(action)
    if isinstance(action, BoxActions):
        low, high = finite_bounds(action.low, action.high)
        return generator.uniform(low, high, (n, *shape)).astype(dtype)
    if isinstance(action, MultiDiscreteActions):
        return generator.integers(0, action.nvec, (n, *shape), dtype)
    if isinstance(action, MultiBinaryActions):
        return generator.integers(0, 2, (n, *shape), dtype)
    assert isinstance(action, DiscreteActions)
    if not spec.mask:
        return generator.integers(0, action.n, (n, *shape), dtype)
    first: NDArray[Any] = read_masks(obs, spec).argmax(axis=1)
    return first
