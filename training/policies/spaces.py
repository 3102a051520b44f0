"""The spaces of a trained policy: as its file describes them, or of its environment, built once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from steadyrl.core.errors import ExpectedError, SettingError, describe
from steadyrl.envs.encoding.description import read_spaces
from steadyrl.envs.encoding.masks import MASK_KEY, OBS_KEY, mask_encoder
from steadyrl.envs.encoding.spaces import Decoder, encoders
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import DiscreteActions, Encoder, spec_of
from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.config.settings import Settings
from steadyrl.training.policies.find import Policy, saved_settings, settings_of


class Spaces(NamedTuple):
    """An environment's spaces and their encoding; `actions`: how many a mask has, 0 without."""

    observation: spaces.Space[Any]
    action: spaces.Space[Any]
    encoder: Encoder
    decoder: Decoder
    actions: int
    mask_in_observation: bool


def spaces_for(
    policy: Policy, overrides: Sequence[str] = (), named: EnvSettings | None = None
) -> tuple[Settings, Spaces]:
    """Return a policy's settings and spaces: as its file describes them, or of its environment.

    With `overrides`, which may change the spaces, they are always those of the environment.
    """
    if not overrides:
        settings = saved_settings(policy)
        saved = saved_spaces(settings.run.env, policy)
        if saved is not None:
            return settings, saved
    settings = settings_of(policy, overrides, named)
    return settings, spaces_of(settings.run.env, policy)


def saved_spaces(settings: EnvSettings, policy: Policy) -> Spaces | None:
    """Return the spaces that a policy's file describes; None if it does not.

    The file may be a stranger's: what it holds is checked as it is read.
    """
    plain = policy.metadata.get("spaces")
    if plain is None:
        return None
    try:
        seen, action, axes = read_spaces(plain)
        inner, actions = seen, 0
        if policy.spec.get("mask"):
            if not isinstance(action, spaces.Discrete):
                raise ValueError("only Discrete actions have masks")
            actions = int(action.n)
            if isinstance(seen, spaces.Dict) and set(seen.spaces) == {MASK_KEY, OBS_KEY}:
                inner = seen[OBS_KEY]
        images = settings.images._replace(axes=axes)
        encoder, decoder = encoders(settings.id, inner, action, images)
    except (ValueError, SettingError) as error:
        raise CheckpointError(f"{policy.path}: its spaces cannot be read: {error}") from None
    if actions:
        encoder = mask_encoder(encoder, actions)
    return Spaces(seen, action, encoder, decoder, actions, inner is not seen)


def spaces_of(settings: EnvSettings, policy: Policy) -> Spaces:
    """Return the spaces of an environment: build it, but for Atari games, whose are known."""
    return _atari(settings.id, policy) or _built(settings)


def _atari(env_id: str, policy: Policy) -> Spaces | None:
    """Return the spaces of an Atari game, from what the policy was trained with; else None."""
    from steadyrl.envs.registration import ATARI, find_spec

    if not (env_id.startswith("ALE/") or find_spec(env_id).entry_point == ATARI):
        return None
    spec = spec_of(policy.spec)
    if not isinstance(spec.action, DiscreteActions) or len(spec.frame_shape) != 3:
        raise CheckpointError(f"{policy.path}: is of {env_id}, but not of its frames and buttons")
    channels, *size = spec.frame_shape
    shape = tuple(size) if channels == 1 else (*size, channels)
    seen, action = spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(spec.action.n)
    encoder, decoder = encoders(env_id, seen, action)
    return Spaces(seen, action, encoder, decoder, 0, False)


def _of_batch(settings: EnvSettings) -> Spaces:
    """Return the spaces of an environment that exists as a vector environment only."""
    from steadyrl.envs.backends.batch import make_batch  # with much that is not needed else

    with contextlib.closing(make_batch(replace(settings, num_envs=1))) as env:
        seen, action = env.single_observation_space, env.single_action_space
        encoder, decoder = encoders(settings.id, seen, action, settings.images)
        return Spaces(seen, action, encoder, decoder, 0, False)


def _built(settings: EnvSettings) -> Spaces:
    from steadyrl.envs.backends.single_env import images_of
    from steadyrl.envs.encoding.masks import find_masks
    from steadyrl.envs.registration import find_spec, make_env

    try:
        spec = find_spec(settings.id)
        if spec.entry_point is None and spec.vector_entry_point is not None:
            return _of_batch(settings)
        with contextlib.closing(make_env(settings)) as env:
            masked = find_masks(env, settings)
            inner = env if masked is None else masked
            seen, action = inner.observation_space, inner.action_space
            images = images_of(inner, settings)
            beside_mask = masked is not None and masked.splits_observation
            encoder, decoder = encoders(settings.id, seen, action, images, beside_mask=beside_mask)
            actions = 0 if masked is None else masked.actions
            if masked is not None:
                encoder = mask_encoder(encoder, actions)
            splits = seen is not env.observation_space
            return Spaces(env.observation_space, action, encoder, decoder, actions, splits)
    except ExpectedError:
        raise
    except Exception as error:  # the environment's own
        reason = f"cannot be built: {describe(error)}"
        raise SettingError("env.id", settings.id, reason) from error
