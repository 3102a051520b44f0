"""N environments stepped sequentially in this process: the fastest backend for cheap ones."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.errors import NonFiniteError
from steadyrl.core.saved_state import LARGEST_SEED, Saved
from steadyrl.envs.backends.single_env import SingleEnv, WarnOnce
from steadyrl.envs.encoding.step_buffer import StepBuffer, load_progress
from steadyrl.envs.faults import Faults, validate_same_spaces
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import Watch
from steadyrl.envs.vector import Backend

log = logging.getLogger("steadyrl")


class SyncBackend(Backend):
    """N environments stepped in a Python loop."""

    supports_replay = True

    def __init__(self, settings: EnvSettings, *, seed: int) -> None:
        self.faults = Faults(settings.max_restarts, settings.role)
        self._seed = seed
        self._envs: list[SingleEnv] = []
        self._spaces = ""  # the same for all
        self._actions: list[Any] = []  # decoded actions of the running step
        try:
            for index in range(settings.num_envs):
                warn = WarnOnce(settings.id) if settings.checked and index == 0 else None
                self._envs.append(SingleEnv(settings, seed=seed, index=index, warn=warn))
                self._rebuild(self._envs[-1], self._try(self._envs[-1]))
            first = self._envs[0]
            self._decode, self.limits = first.decoder.decode, first.encoder.limits
            self.spec = replace(first.spec(), spaces=first.described_spaces())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close every environment; may be called twice and after a failure."""
        for env in self._envs:
            env.close()

    def start(self, out: StepBuffer) -> None:
        """Reset every environment and write the first frames into `out`."""
        for index, env in enumerate(self._envs):
            try:
                env.start(out.frames[index])
            except BaseException as error:  # each one may break
                self._recover(env, error, out)
            self.responses += 1

    def step_async(self, action: NDArray[Any], out: StepBuffer) -> None:
        """Store the decoded actions; the step is computed in `step_wait`."""
        self._actions = self._decode(action)

    def step_wait(self, out: StepBuffer) -> None:
        """Step every environment and fill `out`."""
        for env, action in zip(self._envs, self._actions, strict=True):
            try:
                env.advance(action, out)
            except BaseException as error:  # each one may break
                self._recover(env, error, out)
            self.responses += 1

    def watch(self, seen: Watch) -> None:
        """Call `seen` with each observation before it is encoded."""
        for env in self._envs:
            env.watch(seen)

    def env_actions(self, action: NDArray[Any]) -> NDArray[Any]:
        """Return an agent's actions [N, …] as the environments get them."""
        return np.asarray(self._decode(action))

    def check_next_step(self) -> None:
        """Check environment 0's next step against Gymnasium's API, and warn."""
        self._envs[0].check_next_step()

    def handle_non_finite(self, env: int, error: NonFiniteError, out: StepBuffer) -> None:
        """Rebuild an environment that returned NaN or infinity; its step becomes a reset."""
        self._envs[env].name_code(error, "step" if out.valid[env] else "reset")
        self._recover(self._envs[env], error, out)

    def _recover(self, env: SingleEnv, error: BaseException, out: StepBuffer) -> None:
        """Rebuild an environment that failed, or raise; its step becomes a reset."""
        env.name_code(error)
        self._rebuild(env, error, out.frames[env.index])
        out.set_reset(env.index)

    def _rebuild(
        self, env: SingleEnv, failure: BaseException | None, frame: NDArray[Any] | None = None
    ) -> None:
        """Rebuild an environment until that succeeds; with `frame`, also start an episode."""
        while failure is not None:
            self.faults.handle_failure(env.index, failure)
            failure = self._try(env, frame)

    def _try(self, env: SingleEnv, frame: NDArray[Any] | None = None) -> BaseException | None:
        """Build an environment, with `frame` also start an episode; return the exception if any."""
        try:
            env.build()
            self._spaces = self._spaces or env.spaces
            validate_same_spaces(self._spaces, env.spaces)
            if frame is not None:
                env.start(frame)
        except BaseException as error:
            return error
        return None

    def snapshot(self) -> dict[str, Any]:
        """Return seeds and episode numbers; replaying the actions restores the rest."""
        return {
            "backend_kind": "single",
            "seed": self._seed,
            "episode": [env.episode for env in self._envs],
            "needs_reset": [env.needs_reset for env in self._envs],
        }

    def restore(
        self, saved: dict[str, Any], past_actions: list[NDArray[Any] | None], out: StepBuffer
    ) -> NDArray[np.bool_]:
        """Replay the running episodes; return which of them continue [N]."""
        self._seed = Saved(saved, "backend").whole("seed", 0, LARGEST_SEED)
        replayed = np.zeros(len(self._envs), np.bool_)
        progress = load_progress(saved, len(self._envs)).tolist()
        for env, (episode, over) in zip(self._envs, progress, strict=True):
            env.seed = self._seed
            replayed[env.index] = (
                self._replay(env, episode, past_actions[env.index], out) and env.needs_reset == over
            )
            if not replayed[env.index]:
                env.force_reset(episode)
        return replayed

    def _replay(
        self, env: SingleEnv, episode: int, past_actions: NDArray[Any] | None, out: StepBuffer
    ) -> bool:
        if past_actions is None:
            return False
        try:
            env.replay(episode, past_actions, out.frames[env.index])
        except KeyboardInterrupt:
            raise
        except BaseException:
            log.warning("environment %d could not be replayed", env.index, exc_info=True)
            self._rebuild(env, self._try(env))
            return False
        return True

    def force_reset(self, env: int) -> None:
        """Make the next step of an environment a reset."""
        self._envs[env].force_reset(self._envs[env].episode)
