"""Ranks for tests: forked from this process, or runs of the command forked from a warm one."""

import contextlib
import multiprocessing
import os
import socket

import torch
from command import QUICK
from warm import Process

from steadyrl.training.distributed.comm import Ranks
from steadyrl.training.run.rank_info import RankInfo

LIMIT = 300  # seconds until ranks count as hanging: they need some, on a busy machine more


def free_port():
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(rank, size, port):
    """Return what torchrun would tell a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in (numbers | place).items()}


def together(size, work, *arguments):
    """Return what `work(comm, *arguments)` returns on each of so many ranks."""
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
    assert len(found) == size, "a rank failed; its traceback stands above"
    return found


def _answers(pipes):
    """Return what ranks sent; those that failed sent nothing."""
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
    """Start a run of so many ranks in `folder`; the last one is told something `different`."""
    port = free_port()
    ranks = []
    for rank in range(size):
        more = different if rank == size - 1 else ()
        arguments = [*(QUICK if quick else ()), *overrides, *more]
        ranks.append(Process(folder, arguments, environment(rank, size, port)))
    return ranks
