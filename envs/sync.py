"""N environments one after the other in this process: the leanest way to run cheap ones."""

from __future__ import annotations

import logging
from typing import Any

from numpy.typing import NDArray

from envs.checking import Remarks
from envs.faults import RestartBudget, refuse_other_spaces, spend_or_raise
from envs.replayable import ReplayableEnv
from envs.rows import Rows
from envs.settings import EnvSettings
from envs.slot import EnvSlot
from memory.errors import NonFiniteError

LOG = logging.getLogger("steadyrl")


class SyncVectorEnv(ReplayableEnv):
    """N environments stepped in a plain loop."""

    def __init__(self, settings: EnvSettings, *, seed: int, num_envs: int) -> None:
        self._seed = seed
        self._restarts = RestartBudget(settings.max_restarts)
        self._slots: list[EnvSlot] = []
        self._spaces = ""  # of all of them, once there is one
        self._actions_to_do: list[Any] = []
        try:
            for index in range(num_envs):
                say = Remarks(settings.id) if settings.checked and index == 0 else None
                self._add(EnvSlot(settings, seed=seed, index=index, say=say))
            first = self._slots[0]
            self._decode = first.decoder.decode
            super().__init__(first.spec(num_envs))
        except BaseException:
            self.close()
            raise

    def _add(self, slot: EnvSlot) -> None:
        self._slots.append(slot)
        try:
            self._build(slot)
        except BaseException as error:
            self._rebuild(slot, error)

    def _build(self, slot: EnvSlot) -> None:
        slot.build()
        self._spaces = self._spaces or slot.spaces
        refuse_other_spaces(self._spaces, slot.spaces)

    def close(self) -> None:
        """Close every environment; safe to call twice and after a failure."""
        for slot in self._slots:
            slot.close()

    def _start_all(self, rows: Rows) -> None:
        for index, slot in enumerate(self._slots):
            try:
                slot.start(rows.frames[index])
            except BaseException as error:
                self._recover(index, error, rows)
            rows.set_reset(index)

    def _launch(self, action: NDArray[Any], rows: Rows) -> None:
        self._actions_to_do = self._decode(action)

    def _collect(self, rows: Rows) -> None:
        for slot, action in zip(self._slots, self._actions_to_do, strict=True):
            try:
                slot.advance(action, rows)
            except BaseException as error:  # noqa: PERF203 - each one may break
                self._recover(slot.index, error, rows)

    def _recover(self, index: int, error: BaseException, rows: Rows) -> None:
        """Rebuild an environment that broke, or give up; its row becomes a reset."""
        self._rebuild(self._slots[index], error, rows.frames[index])
        rows.set_reset(index)

    def _rebuild(
        self, slot: EnvSlot, error: BaseException, frame: NDArray[Any] | None = None
    ) -> None:
        """Build an environment anew until it stands, and starts if there is a frame for it."""
        failure: BaseException | None = error
        while failure is not None:
            spend_or_raise(self._restarts, slot.index, self.steps, failure)
            try:
                self._build(slot)
                if frame is not None:
                    slot.start(frame)
                failure = None
            except BaseException as again:
                failure = again

    def _repair(self, env: int, error: NonFiniteError, rows: Rows) -> None:
        self._recover(env, error, rows)

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
                slot.cut(episodes[env] - 1)
                slot.start(rows.frames[env])
                slot.replay(past, rows.frames[env])
            except KeyboardInterrupt:
                raise
            except BaseException:
                LOG.warning("environment %d could not be replayed", env, exc_info=True)
                self._build(slot)

    def _cut(self, env: int, episode: int) -> None:
        self._slots[env].seed = self._seed
        self._slots[env].cut(episode)
