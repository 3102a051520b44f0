"""Which device, how many threads, and that they stay so."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
from typing import TYPE_CHECKING

from steadyrl.agents.networks.settings import is_large_image
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import EnvironmentFailedError, EnvSpec
from steadyrl.memory.process import usable_cores
from steadyrl.training.config.settings import RunSettings

if TYPE_CHECKING:
    import torch

log = logging.getLogger("steadyrl")


def validate_machine(settings: RunSettings) -> None:
    """Refuse what this machine does not have, before torch (slow to import) is asked."""
    threads, cores = settings.threads, os.cpu_count() or 1
    if isinstance(threads, int) and threads > cores:
        raise SettingError("threads", threads, f"this machine has {cores} cores; use threads=auto")
    if settings.log.wandb and importlib.util.find_spec("wandb") is None:
        raise SettingError("log.wandb", "true", "needs wandb, install it with: pip install wandb")
    if settings.device.startswith("cuda") and not has_driver():
        raise device_error(settings.device, "no CUDA driver on this machine")


def has_driver() -> bool:
    """Return whether this machine has a CUDA driver; microseconds, and nothing is initialised."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def device_error(device: str, reason: str) -> SettingError:
    """Return the refusal of a card."""
    return SettingError("device", device, f"{reason}; use device=cpu or device=auto")


def device_name(device: str) -> str:
    """Return the torch name of the device to train on, or refuse one that is not there."""
    import torch

    # Ask the driver's library, not the driver: workers are forked after this.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    available = device != "cpu" and torch.cuda.is_available()
    if not available:
        if device.startswith("cuda"):
            built = torch.backends.cuda.is_built()
            why = "" if built else f": torch {torch.__version__} is built without CUDA"
            raise device_error(device, f"no CUDA device{why}")
        return "cpu"
    kind, _, index = device.partition(":")
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        last = f"cuda:{count - 1}" if count > 1 else "cuda"
        raise SettingError("device", device, f"there is no such card; the last one is {last}")
    return device if kind == "cuda" else "cuda"


def prepare_device(settings: RunSettings, device: torch.device) -> None:
    """Let a device compute as precisely, and as repeatably, as the settings say."""
    import torch

    if settings.deterministic:
        # Before the first product: cuBLAS reads it once.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error" if settings.deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type != "cuda":
        if settings.precision == "tf32":
            log.warning("precision=tf32 has no effect on a CPU, whose products are float32")
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    allowed = settings.precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    # Shapes stay: trying out convolutions once pays, but which one wins is up to the clock.
    torch.backends.cudnn.benchmark = not settings.deterministic
    torch.backends.cudnn.deterministic = settings.deterministic


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


def validate_torch_defaults(env: str) -> None:
    """Refuse an environment that has told torch what tensors are like in this whole process."""
    import torch

    kinds = {
        "dtype": (torch.get_default_dtype(), torch.float32),
        "device": (torch.get_default_device(), torch.device("cpu")),
    }
    for name, (found, ours) in kinds.items():
        if found != ours:
            raise EnvironmentFailedError(
                f"environment {env} has set torch's default {name} to {found}, for this program's "
                "own tensors too: env.backend=async gives it a process of its own"
            )
