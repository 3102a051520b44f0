"""Several processes that are one run: their collectives, and what becomes of them if one is lost.

Rank 0 keeps a small store of its own, which outlives the launcher: there every rank says how it is
(training/distributed/heartbeat.py) and what it saved (training/distributed/saver.py).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.learner.comm import Comm
from steadyrl.core.errors import ExpectedError, describe
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.core.state import Stateful
from steadyrl.training.distributed.heartbeat import Heartbeat, Told
from steadyrl.training.run.rank_info import RankInfo

c10d: Any = dist  # which says of few names that they are for others
POLL = 0.02  # seconds
# Whoever dies closes its connections, whoever hangs is found by its heart: patience is endless,
# because rank 0 may evaluate for hours.
PATIENCE, CONNECTING = timedelta(days=30), timedelta(seconds=60)
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


class PeerLostError(ExpectedError):
    """Another rank is gone or failed, and with it the run: which one, and why."""

    exit_code = 8


class Ranks(Comm, Stateful):
    """One of several processes; see `Comm` for what they do together."""

    state_names = ("_pending",)
    state_limits: ClassVar[Mapping[str, Limits]] = {"_pending": COUNT}

    def __init__(self, rank_info: RankInfo, device: torch.device, step_timeout: float) -> None:
        """Wait for all others, who are started at the same time."""
        self.rank, self.size = rank_info.rank, rank_info.size
        self.is_single = self.size == 1
        self._device = device
        self._pending = self._before = self._total = 0
        launchers, *_ = next(c10d.rendezvous("env://", timeout=CONNECTING))
        # Of the start before this one the launcher's store may hold all that was said.
        launchers = c10d.PrefixStore(f"steadyrl-{os.environ.get(RESTARTS, 0)}", launchers)
        self._keeper, port = _kept_by_first(launchers, self.rank)
        # One who waits in a store holds up all who use the same connection.
        self.store, of_group = (_connected(port) for _ in range(2))
        people = self._meet(launchers)
        self.heart = Heartbeat(self.store, self.rank, people, step_timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=of_group,
            rank=self.rank,
            world_size=self.size,
            timeout=PATIENCE,
        )

    def _meet(self, launchers: Any) -> list[tuple[str, int]]:
        """Wait, in a way that signals can end, until all are there; return hosts and processes."""
        keys = [f"here/{rank}" for rank in range(self.size)]
        launchers.set(keys[self.rank], json.dumps([socket.gethostname(), os.getpid()]))
        missing = keys.copy()
        while missing:
            if launchers.check(missing[-1:]):
                missing.pop()
            else:
                time.sleep(POLL)
        return [json.loads(each) for each in launchers.multi_get(keys)]

    @override
    def all_reduce_(self, tensor: Tensor) -> Tensor:
        with self._waiting():
            dist.all_reduce(tensor)
        return tensor

    @override
    def all_reduce_max(self, *numbers: float) -> list[float]:
        found = torch.tensor(numbers, dtype=torch.float64)
        with self._waiting():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    @override
    def all_gather(self, plain: Any) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(text)
        lengths = [int(length) for length in self.all_reduce_(sizes)]
        texts = [torch.zeros(max(lengths), dtype=torch.uint8) for _ in lengths]
        mine = texts[self.rank].clone()
        mine[: len(text)] = text
        with self._waiting():
            dist.all_gather(texts, mine)
        found = zip(texts, lengths, strict=True)
        return [json.loads(text[:length].numpy().tobytes()) for text, length in found]

    @override
    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            with self._waiting():
                dist.broadcast(tensor.detach(), 0)

    @override
    def global_count(self, valid: NDArray[np.bool_]) -> int:
        return self._total

    def settle(self, valid: int, wishes: Sequence[bool], *, now: bool) -> list[bool] | None:
        """Count a row; `now` together with all ranks: return which wishes any of them has."""
        self.heart.beat()
        self._before = self._pending
        self._pending += valid
        self._total = 0
        if not now:
            return None
        numbers = torch.tensor([self._pending, *wishes], dtype=torch.int64)
        self._total, *found = self.all_reduce_(numbers).tolist()
        self._pending = 0
        return [bool(wish) for wish in found]

    def take_back(self) -> None:
        """Count the last row once more: it is kept for later."""
        self._pending = self._before

    @override
    def long_operation(self) -> AbstractContextManager[None]:
        return self.heart.waits()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            with self.heart.waits():
                yield
        except RuntimeError as error:
            told = self.heart.ask() or Told(-1, describe(error))
            lost = PeerLostError(str(told))
            lost.silent = self.rank != (1 if told.rank == 0 else 0)
            raise lost from error

    @override
    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Let the others know why this rank ends, if it ends by an error; the first one says it."""
        try:
            yield
        except PeerLostError:
            raise
        except BaseException as error:
            if isinstance(error, ExpectedError) and error.together:
                raise
            first = self.heart.tell(Told(self.rank, describe(error)))
            if isinstance(error, ExpectedError):
                error.silent = not first
            raise

    def leave(self, *, together: bool) -> None:
        """Beat no more; together: once all are here, and with nothing left that runs."""
        try:
            if together:
                self.all_gather(None)
        finally:
            self.heart.close()
        if together:
            # A thread of Gloo's may need the GIL to drop a tensor. Old torch waits for that thread
            # with the GIL held, and for ever, unless Python has a reference to Gloo itself.
            gloo = c10d.group.WORLD._get_backend(torch.device("cpu"))
            dist.destroy_process_group()
            del gloo


def _kept_by_first(launchers: Any, rank: int) -> tuple[Any, int]:
    """Return the store that rank 0 keeps, or nothing, and where it listens."""
    if rank == 0:
        host = os.environ["MASTER_ADDR"]
        store = c10d.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=CONNECTING)
        launchers.set("port", str(store.port))
        return store, store.port
    while not launchers.check(["port"]):
        time.sleep(POLL)
    return None, int(launchers.get("port"))


def _connected(port: int) -> Any:
    host = os.environ["MASTER_ADDR"]
    return c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECTING)
