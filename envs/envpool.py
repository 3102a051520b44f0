"""EnvPool's C++ environments, for those who have installed it."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.batch import Simulator, fill
from envs.making import nearest_id, unknown_keyword
from envs.row import Row
from envs.settings import EnvSettings
from envs.single import Remarks
from envs.spaces import encoders
from envs.types import Encoder, EnvSpec
from memory.errors import SettingError

SEED_LIMIT = 2**31 - 1


class EnvPoolSimulator(Simulator):
    """N environments of EnvPool; it is seeded when built, so every start builds it anew."""

    def __init__(self, settings: EnvSettings, *, num_envs: int) -> None:
        self._settings = settings
        self._env: Any = None
        self.spec, encoder, self._decode = _inspect(settings, num_envs)
        self._encode = encoder.write
        if settings.checked:
            Remarks(settings.id)(encoder.remark)

    def close(self) -> None:
        """End the threads; safe to call twice and after a failure."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def start(self, row: Row, seeds: list[int]) -> None:
        """Build all environments with a seed; write their first frames."""
        import envpool

        self.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium's, about the precision of bounds
            self._env = envpool.make(
                self._settings.id,
                env_type="gymnasium",
                num_envs=self.spec.num_envs,
                seed=seeds[0] % SEED_LIMIT,
                **_kwargs(self._settings),
            )
        self._encode(self._env.reset()[0], row.obs, (self.spec.num_envs,))

    def send(self, action: NDArray[Any]) -> None:
        """Begin a step of all environments."""
        self._env.send(np.asarray(self._decode(action), self._env.action_space.dtype))

    def receive(self, row: Row, done: NDArray[np.bool_]) -> None:
        """Finish the step and write the row."""
        observations, reward, terminated, truncated, _ = self._env.recv()
        self._encode(observations, row.obs, (self.spec.num_envs,))
        fill(row, done, reward, terminated, truncated)


def _kwargs(settings: EnvSettings) -> dict[str, Any]:
    """Return EnvPool's keywords; one frame a row where the game offers stacks."""
    import envpool

    config = envpool.make_spec(settings.id).config._fields
    return {**({"stack_num": 1} if "stack_num" in config else {}), **settings.kwargs}


def _inspect(settings: EnvSettings, num_envs: int) -> tuple[EnvSpec, Encoder, Any]:
    if importlib.util.find_spec("envpool") is None:
        raise SettingError(
            "backend", "envpool", 'needs envpool, install it with: pip install -e ".[envpool]"'
        )
    import envpool

    known = envpool.list_all_envs()
    if settings.id not in known:
        raise SettingError("id", settings.id, f"not in EnvPool, {nearest_id(settings.id, known)}")
    try:
        told = envpool.make_spec(settings.id, **_kwargs(settings))
    except TypeError as error:
        raise unknown_keyword(settings, error) or error from None
    encoder, decoder = encoders(
        settings.id, told.gymnasium_observation_space, told.gymnasium_action_space
    )
    spec = EnvSpec.of(settings.id, num_envs, encoder, decoder.spec)
    return spec, encoder, decoder.decode


def probe_envpool(settings: EnvSettings) -> EnvSpec:
    """Say what the environment offers without building it."""
    return _inspect(settings, 1)[0]
