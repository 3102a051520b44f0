"""Build the environments that the settings ask for."""

from __future__ import annotations

import logging

from envs.frame_stack import FrameStackEnv
from envs.making import find_spec
from envs.native import NativeVectorEnv
from envs.processes import ProcessVectorEnv
from envs.settings import EnvSettings
from envs.slot import EnvSlot
from envs.sync import SyncVectorEnv
from envs.types import EnvSpec, VectorEnv
from memory.errors import ExpectedError, SettingError

LOG = logging.getLogger("steadyrl")

# From this many environments on, one batch of array operations beats the plain loop.
NATIVE_FROM = 8


def build_env(settings: EnvSettings, *, seed: int, num_envs: int | None = None) -> VectorEnv:
    """Build the vector environment; `num_envs` replaces the number in the settings."""
    count = settings.num_envs if num_envs is None else num_envs
    backend = choose_backend(settings, count)
    env: VectorEnv
    if backend == "native":
        env = NativeVectorEnv(settings, seed=seed, num_envs=count)
    elif backend == "async":
        env = ProcessVectorEnv(settings, seed=seed, num_envs=count)
    else:
        env = SyncVectorEnv(settings, seed=seed, num_envs=count)
    return FrameStackEnv(env, settings.frame_stack) if settings.frame_stack > 1 else env


def choose_backend(settings: EnvSettings, num_envs: int) -> str:
    """Return the backend to use, and say so where the choice was ours."""
    if settings.backend != "auto":
        return settings.backend
    native = find_spec(settings.id).vector_entry_point is not None and num_envs >= NATIVE_FROM
    backend = "native" if native else "sync"
    LOG.info("backend %s for %d x %s", backend, num_envs, settings.id)
    return backend


def probe(settings: EnvSettings) -> EnvSpec:
    """Build one environment, read what it offers, and close it again."""
    slot = EnvSlot(settings, seed=0, index=0)
    try:
        slot.build()
    except ExpectedError:
        raise
    except Exception as error:
        what = " ".join(str(error).split()) or "no message"
        raise SettingError(
            "id", settings.id, f"cannot be made: {type(error).__name__}: {what}"
        ) from error
    finally:
        slot.close()
    return EnvSpec(
        id=settings.id,
        num_envs=settings.num_envs,
        frame_shape=slot.encoder.shape,
        dtype=slot.encoder.dtype,
        frame_stack=settings.frame_stack,
        action=slot.decoder.spec,
    )
