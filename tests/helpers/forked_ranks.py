"""Ranks for tests: forked from this process, or runs forked from the preloaded process."""

import contextlib
import multiprocessing
import os
import socket

import torch
from command import QUICK
from warm import Process

from steadyrl.training.distributed.comm import Ranks
from steadyrl.training.run.rank_info import RankInfo

LIMIT = 300  # seconds until ranks count as hanging; a busy machine needs some


def free_port():
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(rank, size, port):
    """Return the variables that torchrun sets for a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in (numbers | place).items()}


def together(size, work, *arguments):
    """Run `work(comm, *arguments)` on `size` ranks; return their results."""
    port, context = free_port(), multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_one, args=(rank, size, port, ends[rank][1], work, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, end in ends:
        end.close()
    try:
        found = _answers([receiving for receiving, _ in ends])
        for process in processes:
            process.join(LIMIT)
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not hanging, f"ranks {hanging} did not end"
    assert len(found) == size, "a rank failed; see its traceback above"
    return found


def _answers(pipes):
    """Return the ranks' results; a failed rank has none."""
    found = []
    for pipe in pipes:
        assert pipe.poll(LIMIT), "a rank hangs"
        with contextlib.suppress(EOFError):
            found.append(pipe.recv())
    return found


def _one(rank, size, port, end, work, arguments):
    os.environ.update(environment(rank, size, port))
    torch.set_num_threads(1)
    comm = Ranks(RankInfo(rank, size, rank, size), torch.device("cpu"), 60.0)
    end.send(work(comm, *arguments))
    comm.leave(together=True)


def start(folder, size, *overrides, quick=True, different=()):
    """Start a run of `size` ranks in `folder`; the last also gets the overrides `different`."""
    port = free_port()
    ranks = []
    for rank in range(size):
        more = different if rank == size - 1 else ()
        arguments = [*(QUICK if quick else ()), *overrides, *more]
        ranks.append(Process(folder, arguments, environment(rank, size, port)))
    return ranks
