"""N environments one after the other in this process: the leanest way to run cheap ones."""

from __future__ import annotations

import logging
from typing import Any

from numpy.typing import NDArray

from envs.faults import RestartBudget, fault
from envs.replayable import ReplayableEnv
from envs.rows import Rows
from envs.settings import EnvSettings
from envs.slot import EnvSlot
from envs.types import EnvSpec
from memory.errors import NonFiniteError, SettingError

LOG = logging.getLogger("steadyrl")


class SyncVectorEnv(ReplayableEnv):
    """N environments stepped in a plain loop."""

    def __init__(self, settings: EnvSettings, *, seed: int, num_envs: int) -> None:
        self._seed = seed
        self._restarts = RestartBudget(settings.max_restarts)
        self._slots: list[EnvSlot] = []
        self._actions_to_do: list[Any] = []
        try:
            for index in range(num_envs):
                self._add(EnvSlot(settings, seed=seed, index=index))
            first = self._slots[0]
            self._decode = first.decoder.decode
            super().__init__(
                EnvSpec(
                    id=settings.id,
                    num_envs=num_envs,
                    frame_shape=first.encoder.shape,
                    dtype=first.encoder.dtype,
                    frame_stack=1,
                    action=first.decoder.spec,
                )
            )
        except BaseException:
            self.close()
            raise

    def _add(self, slot: EnvSlot) -> None:
        self._slots.append(slot)
        try:
            slot.build()
        except SettingError:
            raise
        except Exception as error:
            self._rebuild(slot, error)

    def close(self) -> None:
        """Close every environment; safe to call twice and after a failure."""
        for slot in self._slots:
            slot.close()

    def _start_all(self, rows: Rows) -> None:
        for index, slot in enumerate(self._slots):
            try:
                slot.start(rows.frames[index])
            except Exception as error:
                self._recover(index, error, rows)
            rows.set_reset(index)

    def _launch(self, action: NDArray[Any], rows: Rows) -> None:
        self._actions_to_do = self._decode(action)

    def _collect(self, rows: Rows) -> None:
        frames = rows.frames
        for index, slot in enumerate(self._slots):
            try:
                if slot.over:
                    slot.start(frames[index])
                    rows.set_reset(index)
                    continue
                reward, terminated, truncated = slot.step(self._actions_to_do[index], frames[index])
                rows.reward[index] = reward
                rows.terminated[index] = terminated
                rows.truncated[index] = truncated
                rows.valid[index] = True
            except Exception as error:
                self._recover(index, error, rows)

    def _recover(self, index: int, error: Exception, rows: Rows) -> None:
        """Rebuild an environment that broke, or give up; its row becomes a reset."""
        self._rebuild(self._slots[index], error, rows.frames[index])
        rows.set_reset(index)

    def _rebuild(self, slot: EnvSlot, error: Exception, frame: NDArray[Any] | None = None) -> None:
        """Build an environment anew until it stands, and starts if there is a frame for it."""
        failure: Exception | None = error
        while failure is not None:
            self._spend_restart(slot.index, failure)
            try:
                slot.build()
                if frame is not None:
                    slot.start(frame)
                failure = None
            except Exception as again:
                failure = again

    def _repair(self, env: int, error: NonFiniteError, rows: Rows) -> None:
        self._recover(env, error, rows)

    def _spend_restart(self, index: int, error: Exception) -> None:
        """Use one restart up for this failure, or raise it when none is left."""
        failure = fault(index, self.steps, error)
        if not self._restarts.spend():
            raise failure from error
        LOG.error("%s; it is built anew", failure, exc_info=error)

    def _progress(self, env: int) -> tuple[int, bool]:
        return self._slots[env].episode, self._slots[env].over

    def _replay_all(
        self, episodes: list[int], actions: list[NDArray[Any] | None], rows: Rows
    ) -> None:
        for env, slot in enumerate(self._slots):
            slot.seed = self._seed
            past = actions[env]
            if past is None:
                continue
            try:
                slot.replay(episodes[env], past, rows.frames[env])
            except Exception:
                LOG.warning("environment %d could not be replayed", env, exc_info=True)
                slot.build()

    def _cut(self, env: int, episode: int) -> None:
        self._slots[env].seed = self._seed
        self._slots[env].cut(episode)
