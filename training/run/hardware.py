"""Choose the device and the number of threads, and set up torch for them."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from steadyrl.agents.networks.settings import is_large_image
from steadyrl.agents.registry import AgentSettings, SupportsCompile
from steadyrl.core.errors import SettingError, one_line
from steadyrl.envs.types import EnvironmentFailedError, EnvSpec
from steadyrl.memory.process import usable_cores
from steadyrl.training.config.settings import RunSettings
from steadyrl.training.run.rank_info import RankInfo, rank_info

if TYPE_CHECKING:
    import torch

log = logging.getLogger("steadyrl")

# A core does some 5e10 FLOP/s: a smaller update takes it less than 2 ms. A GPU would lose more by
# launches, copies, and environments and updates that are not machine code.
WORTHWHILE_FLOP = 100_000_000

# In a new process: one that has initialised CUDA cannot fork workers any more.
PROBE = """
import sys, torch
try:
    torch.ones(1, device=sys.argv[1]).add_(1).item()
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}".splitlines()[0])
"""
PROBE_SECONDS = 120


def validate_machine(settings: RunSettings) -> None:
    """Raise SettingError for what this machine does not have; without importing torch."""
    threads, cores = settings.threads, os.cpu_count() or 1
    if isinstance(threads, int) and threads > cores:
        raise SettingError("threads", threads, f"this machine has {cores} cores; use threads=auto")
    for name in ("wandb", "trackio"):
        if getattr(settings.log, name).enabled and importlib.util.find_spec(name) is None:
            reason = f"needs {name}, install it with: pip install {name}"
            raise SettingError(f"log.{name}.enabled", "true", reason)
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
    """Return the error for a device that cannot be used."""
    return SettingError("device", device, f"{reason}; use device=cpu or device=auto")


def device_name(device: str) -> str:
    """Return the torch name of a device; raise SettingError if it is not available."""
    import torch

    # NVML does not initialise CUDA, after which no workers could be forked.
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
        there = f"the last one is cuda:{count - 1}" if count > 1 else "there is one, device=cuda"
        raise SettingError("device", device, f"no such GPU; {there}")
    return device if kind == "cuda" else "cuda"


def choose_device(run: RunSettings, agent: AgentSettings, spec: EnvSpec) -> str:
    """Return the torch name of the device to train on.

    `auto` takes a GPU that works and pays, and otherwise logs why the CPU is used. A GPU named in
    the configuration that does not work raises SettingError.
    """
    import torch

    name, asked = device_name(run.device), run.device
    if asked == "auto" and has_driver() and not torch.backends.cuda.is_built():
        if is_worthwhile(run, agent, spec):
            log.info("training on the CPU: torch %s is built without CUDA", torch.__version__)
        return "cpu"
    if name == "cpu":
        return name
    if asked == "auto" and not is_worthwhile(run, agent, spec):
        log.info("training on the CPU: faster for small networks (device=cuda forces the GPU)")
        return "cpu"
    reason = why_unusable(name, rank_info())
    if reason is None:
        return name
    if asked != "auto":
        raise device_error(asked, f"the GPU cannot be used ({reason})")
    log.warning("training on the CPU: the GPU cannot be used (%s)", reason)
    return "cpu"


def is_worthwhile(run: RunSettings, agent: AgentSettings, spec: EnvSpec) -> bool:
    """Return whether a GPU is faster than the CPU, or required by other settings."""
    if run.precision == "tf32" or (
        isinstance(agent, SupportsCompile) and agent.compile == "cudagraph"
    ):
        return True
    from steadyrl.agents.update_cost import update_cost  # with torch

    cost = update_cost(agent, spec)
    return cost.convolves or cost.flop >= WORTHWHILE_FLOP


def why_unusable(name: str, here: RankInfo) -> str | None:
    """Return why a GPU cannot compute (an old driver, no kernels for it); None if it can."""
    import torch

    if torch.cuda.is_initialized():  # by an earlier run of this process
        return None
    if here.size > 1:
        if here.local_size > torch.cuda.device_count():
            return None  # another check reports this
        name = f"cuda:{here.local_rank}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, name],
            cwd=Path(torch.__file__).parents[1],  # so that it imports the same torch
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
            start_new_session=True,  # Ctrl-C is for the run alone
        )
    except subprocess.TimeoutExpired:
        return f"a test on it did not end within {PROBE_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return one_line(lines[-1]) if lines else f"a test on it exited with {done.returncode}"


def prepare_device(settings: RunSettings, device: torch.device) -> None:
    """Set precision and determinism of a device as configured."""
    import torch

    if settings.deterministic:
        # cuBLAS reads it once, at the first matrix product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error" if settings.deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type != "cuda":
        torch.set_float32_matmul_precision("highest")  # a program may have another default
        if settings.precision == "tf32":
            log.warning("precision=tf32 has no effect on a CPU, which multiplies in float32")
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    allowed = settings.precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    # Shapes are static, so benchmarking convolutions pays, but its choice depends on timing.
    torch.backends.cudnn.benchmark = not settings.deterministic
    torch.backends.cudnn.deterministic = settings.deterministic


def thread_count(threads: str | int, spec: EnvSpec, ranks: int = 1) -> int:
    """Return the number of torch threads: one, unless large images are convolved.

    Small matrices lose more by synchronising threads than they gain. `ranks` of one machine share
    its cores.
    """
    if isinstance(threads, int):
        return threads
    return max(1, _most_threads() // ranks) if is_large_image(spec.unmasked_shape) else 1


def _most_threads() -> int:
    """Return the cores this process may use, or fewer if OMP_NUM_THREADS says so, as in torch."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(usable_cores(), int(asked) or 1) if asked.isdecimal() else usable_cores()


def prepare_arithmetic(threads: int) -> None:
    """Set torch's threads, and flush subnormal numbers (below 1e-38) to 0.

    Adam's moments of weights without gradient decay into that range, where a CPU takes many times
    as long for each operation: runs would slow down as they learn.
    """
    import numpy as np
    import torch

    for dtype in (np.float16, np.float32, np.float64):
        np.finfo(dtype)  # asked for later, NumPy 2.0 warns that its smallest number is 0
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


class Arithmetic(NamedTuple):
    """Settings of torch on which the last digits of results depend.

    An environment of this process may change them for its own networks.
    """

    threads: int
    matmul_precision: str

    @classmethod
    def read(cls) -> Self:
        """Return the current settings."""
        import torch

        return cls(torch.get_num_threads(), torch.get_float32_matmul_precision())

    def restore(self) -> None:
        """Set again what has changed since; takes a tenth of a microsecond if nothing has."""
        import torch

        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if torch.get_float32_matmul_precision() != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)


def validate_torch_defaults(env: str) -> None:
    """Raise EnvironmentFailedError if an environment changed what torch makes tensors of."""
    import torch

    try:
        made = torch.empty(0)  # faster than asking for the device, and done at every timestep
        if made.dtype == torch.float32 and made.is_cpu and not made.is_inference():
            return
    except (AssertionError, RuntimeError):  # a device that this machine lacks
        pass
    kinds = {
        "default dtype": (torch.get_default_dtype(), torch.float32),
        "default device": (torch.get_default_device(), torch.device("cpu")),
        "inference mode": (torch.is_inference_mode_enabled(), False),
    }
    for name, (found, ours) in kinds.items():
        if found != ours:
            raise EnvironmentFailedError(
                f"environment {env} has set torch's {name} to {found}, for this program's own "
                "tensors too: env.backend=async gives it a process of its own"
            )
