"""Collectives of a multi-rank run, and error handling when a rank is lost.

Rank 0 runs a TCPStore of its own, which outlives the launcher. Ranks publish their heartbeats
(training/distributed/heartbeat.py) and saved files (training/distributed/saver.py) in it.
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
from steadyrl.training.distributed.heartbeat import Heartbeat, LostRank
from steadyrl.training.run.rank_info import RankInfo

c10d: Any = dist  # torch.distributed marks most of these names as private
POLL = 0.02  # seconds
# A dead rank closes its connections and the heartbeat finds a hanging one, so collectives never
# time out: rank 0 may evaluate for hours.
PATIENCE, CONNECTING = timedelta(days=30), timedelta(seconds=60)
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


class PeerLostError(ExpectedError):
    """Another rank was lost or failed: which one, and why."""

    exit_code = 8


class Ranks(Comm, Stateful):
    """The `Comm` of one rank of several."""

    state_names = ("_pending",)
    state_limits: ClassVar[Mapping[str, Limits]] = {"_pending": COUNT}

    def __init__(self, rank_info: RankInfo, device: torch.device, step_timeout: float) -> None:
        """Wait until all ranks have joined."""
        self.rank, self.size = rank_info.rank, rank_info.size
        self.is_single = self.size == 1
        self._device = device
        self._pending = self._previous = self._total = 0
        launchers, *_ = next(c10d.rendezvous("env://", timeout=CONNECTING))
        # After a restart the launcher's store may still have the keys of the start before.
        launchers = c10d.PrefixStore(f"steadyrl-{os.environ.get(RESTARTS, 0)}", launchers)
        self._server, port = _open_store(launchers, self.rank)
        # A blocking wait in a store blocks its whole connection, so the group gets its own.
        self.store, of_group = (_connect(port) for _ in range(2))
        peers = self._meet(launchers)
        self.heartbeat = Heartbeat(self.store, self.rank, peers, step_timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=of_group,
            rank=self.rank,
            world_size=self.size,
            timeout=PATIENCE,
        )

    def _meet(self, launchers: Any) -> list[tuple[str, int]]:
        """Wait for all ranks, interruptible by signals; return host and process id of each."""
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
        with self._collective():
            dist.all_reduce(tensor)
        return tensor

    @override
    def all_reduce_max(self, *numbers: float) -> list[float]:
        found = torch.tensor(numbers, dtype=torch.float64)
        with self._collective():
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
        with self._collective():
            dist.all_gather(texts, mine)
        found = zip(texts, lengths, strict=True)
        return [json.loads(text[:length].numpy().tobytes()) for text, length in found]

    @override
    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            with self._collective():
                dist.broadcast(tensor.detach(), 0)

    @override
    def global_count(self, valid: NDArray[np.bool_]) -> int:
        return self._total

    def sync_counts(self, valid: int, flags: Sequence[bool], *, now: bool) -> list[bool] | None:
        """Count `valid` steps; with `now`, all-reduce them and return which flags any rank set."""
        self.heartbeat.beat()
        self._previous = self._pending
        self._pending += valid
        self._total = 0
        if not now:
            return None
        numbers = torch.tensor([self._pending, *flags], dtype=torch.int64)
        self._total, *found = self.all_reduce_(numbers).tolist()
        self._pending = 0
        return [bool(wish) for wish in found]

    def uncount(self) -> None:
        """Uncount the last timestep: it is stashed and will be counted later."""
        self._pending = self._previous

    @override
    def long_operation(self) -> AbstractContextManager[None]:
        return self.heartbeat.suspended()

    @contextmanager
    def _collective(self) -> Iterator[None]:
        try:
            with self.heartbeat.suspended():
                yield
        except RuntimeError as error:
            lost = self.heartbeat.find_lost_rank() or LostRank(-1, describe(error))
            peer_lost = PeerLostError(str(lost))
            peer_lost.silent = self.rank != (1 if lost.rank == 0 else 0)
            raise peer_lost from error

    @override
    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """If this rank fails, publish the reason to the others; the first to fail prints it."""
        try:
            yield
        except PeerLostError:
            raise
        except BaseException as error:
            if isinstance(error, ExpectedError) and error.together:
                raise
            first = self.heartbeat.publish(LostRank(self.rank, describe(error)))
            if isinstance(error, ExpectedError):
                error.silent = not first
            raise

    def leave(self, *, together: bool) -> None:
        """Stop the heartbeat; with `together`, first wait for all ranks and close the group."""
        try:
            if together:
                self.all_gather(None)
        finally:
            self.heartbeat.close()
        if together:
            # A Gloo thread may need the GIL to free a tensor. Old torch versions join that thread
            # while holding the GIL, and deadlock unless Python has a reference to the backend.
            gloo = c10d.group.WORLD._get_backend(torch.device("cpu"))
            dist.destroy_process_group()
            del gloo


def _open_store(launchers: Any, rank: int) -> tuple[Any, int]:
    """Return rank 0's store (None on other ranks) and its port."""
    if rank == 0:
        host = os.environ["MASTER_ADDR"]
        store = c10d.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=CONNECTING)
        launchers.set("port", str(store.port))
        return store, store.port
    while not launchers.check(["port"]):
        time.sleep(POLL)
    return None, int(launchers.get("port"))


def _connect(port: int) -> Any:
    host = os.environ["MASTER_ADDR"]
    return c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECTING)
