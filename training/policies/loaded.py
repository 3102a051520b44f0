"""A trained policy for use in other programs: observations in, actions out, as Gymnasium has them.

It encodes observations, stacks frames and keeps a recurrent state as in training.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.agents.base import Actor
from steadyrl.agents.registry import AgentSettings, Sample, finished_policy
from steadyrl.core.errors import (
    SettingError,
    describe,
    one_line,
    validate_bool,
    validate_path,
    validate_whole,
)
from steadyrl.envs.encoding.frame_stack import FrameStack
from steadyrl.envs.encoding.masks import MASK_KEY, OBS_KEY
from steadyrl.envs.encoding.tensors import on_host
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import EnvSpec, plain_spec
from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.config.overrides import override_list
from steadyrl.training.config.settings import Settings
from steadyrl.training.policies.exported import read_exported
from steadyrl.training.policies.find import settings_of, validate_same_spaces
from steadyrl.training.policies.policy import CheckedPolicy, read_policy
from steadyrl.training.policies.spaces import Spaces, spaces_for


class Source(NamedTuple):
    """Where a policy comes from, and what the caller has said of its environment."""

    policy: CheckedPolicy
    overrides: tuple[str, ...]
    named: EnvSettings | None

    def settings(self, env: Sequence[str] = ()) -> Settings:
        """Return the settings of its training, with `env` changed."""
        return settings_of(self.policy, [*self.overrides, *env], self.named)


def load_policy(
    path: str | PathLike[str],
    *,
    best: bool,
    overrides: Sequence[str],
    seed: int,
    named: EnvSettings | None = None,
) -> LoadedPolicy:
    """Read and check a policy.

    Its file describes its spaces. If it does not, or with `overrides`, which may change them, its
    environment is built once; `named`: settings whose modules the caller has named already.
    """
    overrides = override_list("env", overrides, "kwargs.g=5")
    validate_whole("seed", seed, 0)
    validate_path("path", path)
    validate_bool("best", best)
    path = Path(path)
    is_exported = os.path.isfile(path) and not best  # which is chosen in a run's directory
    checked = read_exported(path) if is_exported else read_policy(path, best=best)
    source = Source(checked, tuple(overrides), named)
    settings, about = spaces_for(checked, overrides, named)
    env = settings.run.env
    single = EnvSpec.of(env, about.encoder, about.decoder.spec)
    spec = replace(single, frame_stack=env.frame_stack)
    validate_same_spaces(checked, env.id, plain_spec(spec), checked.spec)
    wrappers = [each.name for each in env.wrapping]
    return LoadedPolicy(source, settings.agent, about, spec, seed, wrappers)


class LoadedPolicy:
    """A trained policy; it acts for one environment, or for a batch of N."""

    def __init__(
        self,
        source: Source,
        settings: AgentSettings,
        about: Spaces,
        spec: EnvSpec,
        seed: int,
        wrappers: Sequence[str],
    ) -> None:
        self.metadata: Mapping[str, Any] = source.policy.metadata
        self._wrappers = wrappers  # between the environment and the policy, innermost first
        self._source, self._settings, self._about = source, settings, about
        self._spec, self._seed = spec, seed
        self._greedy = self._build(spec, None)
        self._sampling: Actor | None = None
        self._last: Actor | None = None  # that acted, in the episodes that go on
        self._samplers = 0  # built so far
        self._size = 0
        self._starts: NDArray[np.bool_] = np.ones(0, np.bool_)
        self._stack: FrameStack | None = None
        self._fit(1)

    def __getattr__(self, name: str) -> NoReturn:
        hint = "; write act(obs), which returns the action alone" if name == "predict" else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        step = self.metadata.get("step")
        after = f" after {step:,} steps" if isinstance(step, int) else ""
        return f"<{self._settings.name.upper()} policy of {self._spec.id}{after}>"

    @property
    def best(self) -> bool:
        """Whether it is the best policy of its run: evaluations of training chose it."""
        return self._source.policy.best

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The environment's observation space."""
        return self._about.observation

    @property
    def action_space(self) -> spaces.Space[Any]:
        """The environment's action space."""
        return self._about.action

    def act(
        self,
        obs: Any,
        *,
        deterministic: bool = True,
        info: Mapping[str, Any] | None = None,
        mask: Any = None,
    ) -> Any:
        """Return the action for an observation, or the actions [N, …] for a batch of N.

        Without `deterministic` it samples as in training. A masked policy needs the allowed
        actions: in the observation, `info["action_mask"]` or `mask` [A] or [N, A]. Frame stacks and
        recurrent states go on from call to call; another N begins new ones.
        """
        validate_bool("deterministic", deterministic)
        obs = on_host(obs)
        try:
            batch = _batch_size(self._about.observation, obs)
        except ValueError as error:
            raise self._wrong_observation(obs, str(error)) from error
        n = 1 if batch is None else batch
        frames = self._encode(obs, batch, self._masks(obs, info, mask, batch))
        if n != self._size:
            self._fit(n)
        stacks = frames if self._stack is None else self._stack.push(frames, ~self._starts)
        actor = self._actor(deterministic)
        action = actor.act(stacks, self._starts).env_action.numpy(force=True)
        self._starts = np.zeros(n, np.bool_)
        decoded = np.asarray(self._about.decoder.decode(action), self._about.action.dtype)
        return decoded[0] if batch is None else decoded

    def reset(self, mask: Any = None) -> None:
        """Begin new episodes: all, or those of `mask` [N], such as `terminated | truncated`."""
        if mask is None:
            self._starts = np.ones(self._size, np.bool_)
            return
        over = np.atleast_1d(np.asarray(on_host(mask), np.bool_))
        if over.shape != (self._size,):
            reason = f"has shape {over.shape}, the last batch was of {self._size}"
            raise SettingError("mask", "reset", reason)
        self._starts = self._starts | over

    def settings(self, env: Sequence[str] = ()) -> Settings:
        """Return the settings of training, with KEY=VALUE below `env` changed."""
        return self._source.settings(env)

    def actor_for(self, spec: EnvSpec, sample: Sample | None) -> Actor:
        """Return an actor of its own for encoded observations of `spec`'s environments."""
        policy = self._source.policy
        validate_same_spaces(policy, spec.id, plain_spec(spec), policy.spec)
        return self._build(spec, sample, in_torch=False)  # as the command evaluates

    def _fit(self, n: int) -> None:
        spec = replace(self._spec, num_envs=n)
        self._size, self._starts = n, np.ones(n, np.bool_)
        self._stack = FrameStack(spec) if spec.frame_stack > 1 else None
        self._sampling = self._last = None

    def _actor(self, deterministic: bool) -> Actor:
        """Return the greedy or the sampling actor, which goes on from where the other is."""
        actor = self._greedy if deterministic else self._sampler()
        last, self._last = self._last, actor
        if last is not None and last is not actor and last.hidden_state is not None:
            actor.hidden_state = last.hidden_state.clone()
        return actor

    def _sampler(self) -> Actor:
        if self._sampling is None:
            seed = self._seed
            if self._samplers:  # another N must not begin the same random numbers again
                others = np.random.SeedSequence([seed, self._samplers])
                seed = int(others.generate_state(1)[0])
            self._samplers += 1
            self._sampling = self._build(self._spec, Sample(self._size, seed))
        return self._sampling

    def _build(self, spec: EnvSpec, sample: Sample | None, *, in_torch: bool = True) -> Actor:
        policy = self._source.policy
        how: Any = {"device": torch.device("cpu"), "sample": sample, "in_torch": in_torch}
        try:
            return finished_policy(self._settings, spec, policy.weights, **how)
        except ValueError as error:
            raise CheckpointError(f"{policy.path}: {error}") from error

    def _encode(self, obs: Any, batch: int | None, masks: NDArray[np.bool_] | None) -> Any:
        """Return the frames [N, …] of an observation or a batch."""
        spec = self._spec
        frames = np.zeros((1 if batch is None else batch, *spec.frame_shape), spec.dtype)
        try:
            with np.errstate(over="ignore"):  # beyond float32 is an error below, not a warning
                if batch is not None and masks is None:
                    self._about.encoder.write(obs, frames, (batch,))
                else:
                    self._encode_each(obs, frames, batch, masks)
        except (ValueError, TypeError, LookupError, FloatingPointError) as error:
            reason = one_line(str(error)) if type(error) is ValueError else describe(error)
            raise self._wrong_observation(obs, reason) from error
        if not np.isfinite(frames).all():
            raise SettingError(
                "obs", type(obs).__name__, "holds NaN, infinity or a number beyond float32"
            )
        return frames

    def _wrong_observation(self, obs: Any, reason: str) -> SettingError:
        """Return the error for an observation that does not fit the policy's space."""
        if self._wrappers:
            names = ", ".join(self._wrappers)
            reason += f"; the policy takes observations after env.wrappers: {names}"
        return SettingError("obs", type(obs).__name__, reason)

    def _encode_each(
        self, obs: Any, frames: NDArray[Any], batch: int | None, masks: NDArray[np.bool_] | None
    ) -> None:
        """Write the frames one by one, as masks are packed."""
        about = self._about
        for i, frame in enumerate(frames):
            one = obs if batch is None else _item(about.observation, obs, i)
            seen = one[OBS_KEY] if about.mask_in_observation else one
            about.encoder.write(seen if masks is None else (seen, masks[i]), frame)

    def _masks(
        self, obs: Any, info: Mapping[str, Any] | None, mask: Any, batch: int | None
    ) -> NDArray[np.bool_] | None:
        """Return the allowed actions [N, A]; None for a policy without masks."""
        actions = self._about.actions
        if not actions:
            if mask is not None:
                raise SettingError("mask", "given", "this policy was trained without action masks")
            return None
        if mask is None:
            held = obs if self._about.mask_in_observation else info or {}
            mask = held.get(MASK_KEY)
        if mask is None:
            reason = f"this policy needs the allowed actions: info= with {MASK_KEY!r}, or mask="
            raise SettingError("mask", None, reason)
        given, shape = np.asarray(on_host(mask)), (actions,) if batch is None else (batch, actions)
        if given.dtype == object and given.shape == shape[:1]:
            given = np.array([*given])  # as Gymnasium collects the lists of several environments
        if given.shape != shape:
            raise SettingError("mask", "given", f"has shape {given.shape}, expected {shape}")
        allowed: NDArray[np.bool_] = (given == 1).reshape(-1, actions)
        if not (allowed | (given == 0).reshape(-1, actions)).all():
            raise SettingError("mask", "given", "holds other values than 0 and 1")
        none = ~allowed.any(axis=1)
        if none.any() and batch is None:
            raise SettingError("mask", "given", "allows no action at all")
        # Of several environments, one whose episode has ended ignores its next action.
        allowed[none] = True
        return allowed


def _batch_size(space: spaces.Space[Any], obs: Any) -> int | None:
    """Return N of a batch as Gymnasium's vector environments give it; None for one observation.

    ValueError for what is neither.
    """
    try:
        while isinstance(space, spaces.Dict | spaces.Tuple):
            parts = space.spaces
            key: Any = next(iter(parts)) if isinstance(parts, Mapping) else 0
            space, obs = parts[key], obs[key]
        shape = np.shape(obs)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"is not of {space}") from error
    inner = space.shape or ()
    if shape == inner:
        return None
    if shape[1:] == inner and shape and shape[0]:
        return int(shape[0])
    found = "is no array" if isinstance(obs, Mapping) else f"has shape {shape}"
    raise ValueError(f"{found}, its space says {inner}")


def _item(space: spaces.Space[Any], obs: Any, i: int) -> Any:
    """Return observation `i` of a batch."""
    if isinstance(space, spaces.Dict):
        return {key: _item(part, obs[key], i) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_item(part, obs[k], i) for k, part in enumerate(space.spaces))
    return obs[i]
