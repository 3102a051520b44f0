"""Build the environments that the settings ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from envs.atari import AtariVectorEnv, probe_atari
from envs.choosing import choose_backend, may_become_async
from envs.faults import WorkerError, told
from envs.frame_stack import FrameStackEnv
from envs.native import NativeVectorEnv, probe_native
from envs.pool import PoolVectorEnv, probe_pool
from envs.processes import ProcessVectorEnv, describe_in_process
from envs.settings import EnvSettings
from envs.slot import probe_slot
from envs.sync import SyncVectorEnv
from envs.types import EnvironmentFailedError, EnvSpec, VectorEnv
from memory.errors import ExpectedError, SettingError

log = logging.getLogger("steadyrl")

BACKENDS = {
    "sync": SyncVectorEnv,
    "async": ProcessVectorEnv,
    "native": NativeVectorEnv,
    "ale": AtariVectorEnv,
    "envpool": PoolVectorEnv,
}
PROBES = {
    "async": describe_in_process,
    "native": probe_native,
    "ale": probe_atari,
    "envpool": probe_pool,
}


def build_env(settings: EnvSettings, *, seed: int, num_envs: int | None = None) -> VectorEnv:
    """Build the vector environment; `num_envs` replaces the number in the settings."""
    count = settings.num_envs if num_envs is None else num_envs
    with _making(settings, EnvironmentFailedError):
        backend, reason = choose_backend(settings, count)
        log.info("backend %s for %d x %s: %s", backend, count, settings.id, reason)
        env: VectorEnv = BACKENDS[backend](settings, seed=seed, num_envs=count)
    return FrameStackEnv(env, settings.frame_stack) if settings.frame_stack > 1 else env


def probe(settings: EnvSettings) -> EnvSpec:
    """Say what the environment offers, building at most one copy and closing it again.

    What an environment raises is refused like any wrong setting, what would have ended this
    process is a failure. What may run in processes is not made in this one.
    """
    with _making(settings, SettingError):
        backend = choose_backend(settings, 1).backend
        if backend == "sync" and may_become_async(settings):
            backend = "async"
        found = PROBES.get(backend, probe_slot)(settings)
    return replace(found, num_envs=settings.num_envs, frame_stack=settings.frame_stack)


@contextmanager
def _making(settings: EnvSettings, kind: type[ExpectedError]) -> Iterator[None]:
    """Say in one line why an environment cannot be made; `kind` is for ordinary exceptions."""
    try:
        yield
    except (ExpectedError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raised = error.raised if isinstance(error, WorkerError) else isinstance(error, Exception)
        what = f"cannot be made: {told(error)}"
        if raised and kind is SettingError:
            raise SettingError("id", settings.id, what) from error
        raise EnvironmentFailedError(f"{settings.id} {what}") from error
