"""Start-up and shutdown of a multi-rank run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.core.errors import ExpectedError, SettingError, show
from steadyrl.training.config.overrides import flatten
from steadyrl.training.config.settings import Job
from steadyrl.training.run.hardware import device_name
from steadyrl.training.run.rank_info import RankInfo, rank_info


@contextmanager
def init_comm(job: Job, stop: Stop) -> Iterator[Comm]:
    """Yield the communicator: `SINGLE_PROCESS`, or `Ranks` once all ranks have joined.

    With several ranks, a stop takes effect when all have agreed on it.
    """
    here = rank_info()
    if here.size == 1:
        yield SINGLE_PROCESS
        return
    stop.multi_rank = True
    from steadyrl.training.distributed.comm import Ranks  # not needed by a single process

    device = torch.device(device_name(job.settings.run.device))
    if device.index is not None:
        reason = (
            "each rank uses its own GPU: set device=cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
        raise SettingError("device", str(device), reason)
    if device.type == "cuda":
        use_own_device(here)
    ranks = Ranks(here, device, job.settings.run.env.step_timeout)
    failed = True
    try:
        with ranks.reporting_errors():
            validate_same_config(job, ranks)
            yield ranks
            failed = False
    except ExpectedError as error:
        failed = not error.together
        raise
    finally:
        ranks.leave(together=not failed)


def use_own_device(here: RankInfo) -> None:
    """Select the GPU of this rank; raise SettingError if there are fewer GPUs than ranks."""
    devices = torch.cuda.device_count()
    if here.local_size > devices:
        reason = f"{here.local_size} ranks on a machine with {devices} GPUs: start {devices} ranks"
        raise SettingError("device", "cuda", reason)
    torch.cuda.set_device(here.local_rank)


def validate_same_config(job: Job, comm: Comm) -> None:
    """Raise SettingError, naming the first differing key, if the ranks' configurations differ."""
    # The resolved device: `auto` may differ between ranks if a GPU does not work.
    config = {**job.config, "device": job.settings.run.device}
    text = json.dumps(config, sort_keys=True, default=str)
    hashes = comm.all_gather(hashlib.sha256(text.encode()).hexdigest())
    if len(set(hashes)) == 1:
        return
    other = next(rank for rank, each in enumerate(hashes) if each != hashes[0])
    configs = [dict(flatten(each)) for each in comm.all_gather(json.loads(text))]
    for key in sorted(configs[0] | configs[other]):
        one, two = (configs[rank].get(key) for rank in (0, other))
        if one != two:
            reason = (
                f"on rank 0, but {show(two)} on rank {other}: start all ranks with the same command"
            )
            raise SettingError(key, show(one), reason)
