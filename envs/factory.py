"""Build the environments that the settings ask for."""

from __future__ import annotations

import logging
from dataclasses import replace

from envs.atari import AtariVectorEnv, probe_atari
from envs.choosing import choose_backend
from envs.frame_stack import FrameStackEnv
from envs.native import NativeVectorEnv
from envs.pool import PoolVectorEnv, probe_pool
from envs.processes import ProcessVectorEnv
from envs.settings import EnvSettings
from envs.slot import probe_slot
from envs.sync import SyncVectorEnv
from envs.types import EnvSpec, VectorEnv
from memory.errors import ExpectedError, SettingError

LOG = logging.getLogger("steadyrl")

BACKENDS = {
    "sync": SyncVectorEnv,
    "async": ProcessVectorEnv,
    "native": NativeVectorEnv,
    "ale": AtariVectorEnv,
    "envpool": PoolVectorEnv,
}
PROBES = {"ale": probe_atari, "envpool": probe_pool}


def build_env(settings: EnvSettings, *, seed: int, num_envs: int | None = None) -> VectorEnv:
    """Build the vector environment; `num_envs` replaces the number in the settings."""
    count = settings.num_envs if num_envs is None else num_envs
    backend, reason = choose_backend(settings, count)
    LOG.info("backend %s for %d x %s: %s", backend, count, settings.id, reason)
    env: VectorEnv = BACKENDS[backend](settings, seed=seed, num_envs=count)
    return FrameStackEnv(env, settings.frame_stack) if settings.frame_stack > 1 else env


def probe(settings: EnvSettings) -> EnvSpec:
    """Say what the environment offers, building at most one copy and closing it again."""
    backend = choose_backend(settings, 1).backend
    try:
        told = PROBES.get(backend, probe_slot)(settings)
    except ExpectedError:
        raise
    except Exception as error:
        what = " ".join(str(error).split()) or "no message"
        raise SettingError(
            "id", settings.id, f"cannot be made: {type(error).__name__}: {what}"
        ) from error
    return replace(told, num_envs=settings.num_envs, frame_stack=settings.frame_stack)
