"""EnvPool's C++ environments (extra `envpool`)."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from steadyrl.core.command.typed import install_command
from steadyrl.core.errors import SettingError, did_you_mean
from steadyrl.envs.backends.batch import BatchBackend
from steadyrl.envs.backends.single_env import close_quietly
from steadyrl.envs.encoding.description import describe_spaces
from steadyrl.envs.encoding.spaces import encoders
from steadyrl.envs.encoding.step_buffer import StepBuffer
from steadyrl.envs.registration import explicit_time_limit, imports_module, unknown_keyword
from steadyrl.envs.settings import EnvSettings

SEED_LIMIT = 2**31 - 1


class EnvPoolBackend(BatchBackend):
    """N environments of EnvPool, which is seeded at construction: every start rebuilds it."""

    def __init__(self, settings: EnvSettings, *, seed: int) -> None:
        self._settings = settings
        self._env: Any = None
        spaces = _spaces(settings)
        encoder, decoder = encoders(settings.id, *spaces, settings.images)
        super().__init__(settings, spaces[0], encoder, decoder.spec, seed=seed)
        self.spec = replace(self.spec, spaces=describe_spaces(*spaces, settings.images.axes))
        self._decode = decoder.decode

    def close(self) -> None:
        """Stop the threads; may be called twice and after a failure."""
        env, self._env = self._env, None
        if env is not None:
            close_quietly(env, self._settings.id)

    def _reset(self, seeds: list[int]) -> Any:
        import envpool

        self.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium's warning about the precision of bounds
            self._env = envpool.make(
                self._settings.id,
                env_type="gymnasium",
                num_envs=self.spec.num_envs,
                seed=seeds[0] % SEED_LIMIT,
                **_kwargs(self._settings),
            )
        return self._env.reset()[0]

    def env_actions(self, action: NDArray[Any]) -> NDArray[Any]:
        """Return an agent's actions [N, …] as the environments get them."""
        return np.asarray(self._decode(action), self._env.action_space.dtype)

    def _send(self, action: NDArray[Any]) -> None:
        self._env.send(self.env_actions(action))

    def _receive(self, out: StepBuffer) -> None:
        self._fill(out, *self._env.recv())


def _kwargs(settings: EnvSettings) -> dict[str, Any]:
    """Return EnvPool's keyword arguments, with its own frame stacking switched off."""
    import envpool

    config = envpool.make_spec(settings.id).config._fields
    return {
        **({"stack_num": 1} if "stack_num" in config else {}),
        **explicit_time_limit(settings.kwargs),
    }


def _spaces(settings: EnvSettings) -> tuple[Space[Any], Space[Any]]:
    if importlib.util.find_spec("envpool") is None:
        reason = f"needs envpool, install it with: {install_command('envpool')}"
        raise SettingError("backend", "envpool", reason)
    import envpool

    known = envpool.list_all_envs()
    if settings.id not in known:
        hint = "" if imports_module(settings.id) else did_you_mean(settings.id, known)
        raise SettingError("id", settings.id, f"not in EnvPool{hint and f'; {hint}'}")
    try:
        spec = envpool.make_spec(settings.id, **_kwargs(settings))
    except TypeError as error:
        raise unknown_keyword(settings, error) or error from None
    return spec.gymnasium_observation_space, spec.gymnasium_action_space
