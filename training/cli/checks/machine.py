"""What there is on this machine: processor, memory, GPU, engines, caches."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from steadyrl.agents.engine.graphs.compile_directory import CHOICE, compile_directory
from steadyrl.core.gates.gate import Gate, Unsupported
from steadyrl.core.gates.numba_private import NUMBA
from steadyrl.core.gates.reference import SWITCH, reference_only
from steadyrl.core.gates.torch_private import TORCH
from steadyrl.core.jit import floats_at
from steadyrl.core.private_directories import can_execute, code_directory, make_private
from steadyrl.memory.bounds import control_groups
from steadyrl.memory.budget import tightest_bound
from steadyrl.memory.process import PROC, readable, usable_cores
from steadyrl.training.run.hardware import has_driver, why_unusable
from steadyrl.training.run.rank_info import rank_info

YES = "yes"
# Private names that make something faster; without them it only takes longer.
UPDATES = ("fused_adam", "run_backward", "versions")
COMPILED = ("trace", "host_code")
# Variables of the environment that change how a run goes.
VARIABLES = (SWITCH, CHOICE, "CXX", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "MUJOCO_GL", "TMPDIR")
PREFIXES = ("NUMBA_", "OMP_", "MKL_", "TORCHINDUCTOR_", "PYTORCH_", "XDG_CACHE", "PYTHONPATH")


def machine() -> dict[str, str]:
    """Return system, processor, cores and memory."""
    bound = tightest_bound()
    usable = f"{readable(bound.free)} ({bound.name})"
    memory = psutil.virtual_memory().total
    allowed = usable_cores()
    quota = cpu_quota()
    cores = f"{allowed} of {os.cpu_count()} usable"
    if quota is not None:
        cores += f", a cgroup allows the time of {quota:g}"
    libc = " ".join(platform.libc_ver())
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {libc}",
        "processor": processor(),
        "cores": cores,
        "memory": f"{readable(memory)}, of which a run can use {usable}",
        "gpu": gpu(),
    }


def cpu_info() -> tuple[str, str]:
    """Return the processor's name and its flags."""
    name, flags = platform.processor() or platform.machine(), ""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            name = value if key == "model name" else name
            flags = value if key in ("flags", "Features") else flags
    return name, flags


def processor() -> str:
    """Return the processor's name and the widest vectors it has."""
    name, flags = cpu_info()
    wide = next((each for each in ("avx512f", "avx2", "avx", "sve", "asimd") if each in flags), "")
    return f"{name} ({wide})" if wide else name


def cpu_quota(proc: Path = PROC) -> float | None:
    """Return how many cores' time this process's cgroup may use; None: it has no limit."""
    quotas = (_quota(group.directory / "cpu.max") for group in control_groups(proc))
    return min((each for each in quotas if each is not None), default=None)


def _quota(file: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        most, period = file.read_text().split()
        return int(most) / int(period)  # ValueError: "max"
    return None


def gpu() -> str:
    """Return the GPUs, or why none can be used."""
    if not has_driver():
        return "none: no CUDA driver"
    if not torch.backends.cuda.is_built():
        return f"unusable: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "unusable: a CUDA driver, but torch finds no device"
    reason = why_unusable("cuda", rank_info())
    if reason is not None:
        return f"unusable: {reason}"
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    listed = ", ".join(f"{each.name} ({readable(each.total_memory)})" for each in found)
    return f"{listed}, CUDA {torch.version.cuda}"


def engines(gpu: str) -> dict[str, str]:
    """Return what can run updates, policies and rollouts: `yes`, or why not."""
    eager = f"no: {SWITCH}=eager" if reference_only() else ""
    no_gpu = "" if not gpu.startswith(("none", "unusable")) else f"no: {gpu.partition(': ')[2]}"
    return {
        "eager updates": YES,
        "direct updates": eager or why_not(TORCH, *UPDATES),
        "compiled updates": eager or no_compiler() or why_not(TORCH, *COMPILED),
        "CUDA graphs": eager or no_gpu or why_not(TORCH, "release_pool", "capture_stream"),
        "compiled policies": eager or why_not(NUMBA, "products"),
        "fused rollouts": eager or why_not(NUMBA, "call"),
        "cached machine code": why_not(NUMBA, "cache", "early_load"),
    }


def why_not(gate: Gate, *features: str) -> str:
    """Return `yes` if a library has all that these features need, else what it lacks."""
    for feature in features:
        try:
            gate.require(feature)
        except (Unsupported, OSError) as missing:  # torch's compiler needs a temporary directory
            return f"no: {missing}"
    return YES


def no_compiler() -> str:
    """Return why there is no C++ compiler; "" if there is one."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return "" if shutil.which(name) else f"no: there is no C++ compiler {name} (or set CXX)"


def caches() -> dict[str, str]:
    """Return where compiled code is kept, and what is wrong there."""
    machine_code = getattr(floats_at, "stats", None)
    place = machine_code.cache_path if machine_code is not None else None
    return {
        "compiled updates": _cache(code_directory()),
        "the compiler's files": _cache(compile_directory()),
        "machine code": _cache(Path(place)) if place else "no: no private directory for it",
    }


def _cache(place: Path) -> str:
    if not make_private(place):
        return f"{place}: unusable, not writable, or by others too"
    if not can_execute(place):
        return f"{place}: unusable, mounted noexec"
    free = shutil.disk_usage(place).free
    return f"{place} (private, executable, {readable(free)} free)"


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the environment that change how a run goes."""
    names = sorted(n for n in environment if n in VARIABLES or n.startswith(PREFIXES))
    return {name: environment[name] for name in names}
