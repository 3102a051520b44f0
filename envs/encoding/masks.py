"""Action masks: read from the environment after every step, packed into bits of the observation.

So replay, rollout and workers carry each observation's mask without further fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.core.errors import SettingError
from steadyrl.envs.encoding.first_reset import first_info
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import MASK_BITS, DiscreteActions, Encoder, EnvSpec

MASK_KEY, OBS_KEY = "action_mask", "observation"  # keys in `info` and in Dict observations
METHOD = "action_masks"
LIKE_A_MASK = re.compile(r"mask|legal|valid|avail|allow", re.I)
ReadMask = Callable[[Any, Mapping[str, Any]], Any]


class InvalidMaskError(ValueError):
    """A mask that is missing or cannot be used; `method` returned it, None: reset or step."""

    method: str | None
    user_frames: tuple[str, ...] = ()  # as an ExpectedError's


def find_masks(
    env: gym.Env[Any, Any], settings: EnvSettings, remark: Callable[[str], None] | None = None
) -> Masked | None:
    """Wrap an environment that provides action masks; return None for others.

    Only `env.action_masks=auto` may have to reset the environment once, to look into `info`; then
    `remark` gets lines: about what looks like a mask and is none, and about a seed without effect.
    """
    wanted, actions, space = settings.action_masks, env.action_space, env.observation_space
    if wanted == "false":
        return None
    if not isinstance(actions, spaces.Discrete):
        _remark_ignored(env, remark)
        return None
    if isinstance(space, spaces.Dict) and set(space.spaces) == {MASK_KEY, OBS_KEY}:
        if space[MASK_KEY].shape != (actions.n,):
            found = f"its observation's {MASK_KEY} has shape {space[MASK_KEY].shape}"
            reason = f"{found}, there are {actions.n} actions; env.action_masks=false ignores that"
            raise SettingError("id", settings.id, reason)
        return Masked(
            env, f"observation[{MASK_KEY!r}]", lambda seen, _: seen[MASK_KEY], space[OBS_KEY]
        )
    read = env.get_wrapper_attr(METHOD) if env.has_wrapper_attr(METHOD) else None
    if callable(read):
        return Masked(env, f"{METHOD}()", lambda *_: read())
    info = {} if wanted == "true" else first_info(env, remark)
    if wanted == "true" or MASK_KEY in info:
        return Masked(env, f"info[{MASK_KEY!r}]", lambda _, info: info[MASK_KEY])
    unused = [f"info[{key!r}]" for key, value in info.items() if _is_like_mask(key, value, actions)]
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
        unused += [f"observation[{k!r}]" for k, part in parts if _is_like_mask(k, part, actions)]
    if unused and remark is not None:
        remark(
            f"{unused[0]} is not used as an action mask: masks are info[{MASK_KEY!r}], "
            f"{METHOD}(), or a Dict observation of {OBS_KEY} and {MASK_KEY}"
        )
    return None


def _remark_ignored(env: gym.Env[Any, Any], remark: Callable[[str], None] | None) -> None:
    """Say if there are masks of several discrete actions, which none of our agents supports."""
    several = spaces.MultiDiscrete | spaces.MultiBinary
    if remark is None or not isinstance(env.action_space, several):
        return
    space = env.observation_space
    if isinstance(space, spaces.Dict) and MASK_KEY in space.spaces:
        source = f"observation[{MASK_KEY!r}]"
    elif env.has_wrapper_attr(METHOD):
        source = f"{METHOD}()"
    elif MASK_KEY in first_info(env, remark):
        source = f"info[{MASK_KEY!r}]"
    else:
        return
    kind = type(env.action_space).__name__
    remark(f"{source} is not used: only Discrete actions are masked, and these are {kind}")


def _is_like_mask(key: Any, given: Any, actions: spaces.Discrete) -> bool:
    """Return whether a value or a space has a mask's name, and an element for each action."""
    if not isinstance(key, str) or not LIKE_A_MASK.search(key):
        return False
    try:
        shape = getattr(given, "shape", None) or np.shape(given)
    except ValueError:  # lists of different lengths
        return False
    return tuple(shape) == (actions.n,)


def require_masks(settings: EnvSettings, spec: EnvSpec) -> None:
    """Raise SettingError for env.action_masks=true if the environment provides none."""
    if settings.action_masks != "true" or spec.mask:
        return
    reason = (
        f"{spec.id} provides none: no info[{MASK_KEY!r}] from reset(), no such observation key, "
        f"no {METHOD}()"
    )
    if not isinstance(spec.action, DiscreteActions):
        kind = type(spec.action).__name__.removesuffix("Actions")
        reason = f"masks need Discrete actions, but {spec.id} has {kind} actions"
    raise SettingError("action_masks", "true", reason)


class Masked(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper whose observations are pairs (observation, mask [A] of allowed actions)."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        source: str,
        read: ReadMask,
        seen: spaces.Space[Any] | None = None,
    ) -> None:
        super().__init__(env)
        assert isinstance(env.action_space, spaces.Discrete)
        self.source = source
        self._method = METHOD if source == f"{METHOD}()" else None
        self._read, self._space, self.splits_observation = read, env.action_space, seen is not None
        self.actions = int(env.action_space.n)
        self._all_allowed = np.ones(self.actions, np.bool_)
        self._allowed = self._all_allowed
        if seen is not None:
            self.observation_space = seen

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset and read the mask."""
        observation, info = self.env.reset(**kwargs)
        return self._with_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step and read the mask; after a termination all actions count as allowed."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        pair = self._with_mask(observation, info, over=bool(terminated))
        return pair, reward, terminated, truncated, info

    def sample_action(self) -> Any:
        """Sample an allowed action."""
        return self._space.sample(self._allowed.astype(np.int8))

    def _with_mask(
        self, observation: Any, info: Mapping[str, Any], *, over: bool = False
    ) -> tuple[Any, NDArray[np.bool_]]:
        self._allowed = self._all_allowed if over else self._read_mask(observation, info)
        return observation[OBS_KEY] if self.splits_observation else observation, self._allowed

    def _read_mask(self, observation: Any, info: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Return the mask [A]; raise InvalidMaskError if there is none that can be used."""
        try:
            given = np.asarray(self._read(observation, info))
        except KeyError:
            if self._method:  # an error of the user's method
                raise
            raise self._invalid("is missing: a mask is needed every step") from None
        if given.shape != self._all_allowed.shape:
            raise self._invalid(f"has shape {given.shape}, there are {self.actions} actions")
        allowed = given if given.dtype == np.bool_ else given == 1
        if allowed is not given and not (allowed | (given == 0)).all():
            raise self._invalid(f"holds other values than 0 and 1: {given.tolist()}")
        if not allowed.any():
            raise self._invalid("allows no action at all")
        return allowed

    def _invalid(self, reason: str) -> InvalidMaskError:
        error = InvalidMaskError(f"{self.source} {reason}")
        error.method = self._method
        return error


def mask_encoder(encoder: Encoder, actions: int) -> Encoder:
    """Return an encoder of (observation, mask [actions]) that appends the mask as packed bits.

    The bits follow a vector's elements, or an image's last row. The first action is the lowest bit
    of the first appended element.
    """
    bits = MASK_BITS[encoder.dtype]
    powers = np.exp2(np.arange(bits)).astype(np.float32)
    mask, shape = -(-actions // bits), encoder.shape
    count, axis = mask, 0
    if len(shape) == 3:
        axis, row_of_all = 1, shape[0] * shape[2]
        mask = -(-mask // row_of_all)
        count = mask * row_of_all
    end, scratch = shape[axis], np.zeros((count, bits), np.float32)
    digits = scratch.reshape(-1)[:actions]

    def write(observation: Any, out: NDArray[Any], lead: tuple[int, ...] = ()) -> None:
        seen, allowed = observation
        above, below = (out[:end], out[end:]) if axis == 0 else (out[:, :end], out[:, end:])
        encoder.write(seen, above, lead)
        digits[:] = allowed
        below[...] = (scratch @ powers).reshape(below.shape)

    whole = (*shape[:axis], shape[axis] + mask, *shape[axis + 1 :])
    return encoder._replace(shape=whole, write=write, mask=mask)


def read_masks(obs: NDArray[Any], spec: EnvSpec) -> NDArray[np.bool_]:
    """Return the masks [N, A] packed into observations [N, …], of the newest frame, without torch.

    Learning reads them by `agents/networks/action_mask.py: Masks.allowed`.
    """
    assert isinstance(spec.action, DiscreteActions)
    newest = obs[:, -spec.frame_shape[0] :]
    packed = newest[:, -spec.mask :] if obs.ndim == 2 else newest[:, :, -spec.mask :]
    values = packed.reshape(len(obs), -1, 1).astype(np.int64)
    bits: NDArray[np.bool_] = (values >> np.arange(MASK_BITS[spec.dtype])) & 1 == 1
    return bits.reshape(len(obs), -1)[:, : spec.action.n]
