"""Which device, and how many threads."""

from __future__ import annotations

import ctypes
import importlib.util
import os

from agents.network_settings import is_large_image
from envs.types import EnvSpec
from memory.errors import SettingError
from memory.process import usable_cores
from training.settings import RunSettings


def refuse_unfit_machine(settings: RunSettings) -> None:
    """Refuse what this machine does not have, before torch (slow to import) is asked."""
    threads, cores = settings.threads, os.cpu_count() or 1
    if isinstance(threads, int) and threads > cores:
        raise SettingError("threads", threads, f"this machine has {cores} cores; use threads=auto")
    if settings.log.wandb and importlib.util.find_spec("wandb") is None:
        raise SettingError("log.wandb", "true", "needs wandb, install it with: pip install wandb")
    if settings.device == "cuda":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            reason = "no CUDA driver on this machine; use device=cpu or device=auto"
            raise SettingError("device", settings.device, reason) from None


def device_name(device: str) -> str:
    """Return the torch name of the device to train on."""
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise SettingError("device", device, "no CUDA device; use device=cpu or device=auto")
    return "cuda" if device != "cpu" and available else "cpu"


def thread_count(threads: str | int, spec: EnvSpec, ranks: int = 1) -> int:
    """Return the number of torch threads: small matrices lose more to waiting than they gain.

    So many `ranks` of a machine share its cores.
    """
    if isinstance(threads, int):
        return threads
    return max(1, usable_cores() // ranks) if is_large_image(spec.seen_shape) else 1


def prepare_arithmetic(threads: int) -> None:
    """Set torch's threads, and have numbers below 1e-38 count as 0.

    The moments of weights that no longer matter fade into that range, where a CPU takes many times
    as long for each operation: a run would become slower the longer it learns.
    """
    import torch

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
