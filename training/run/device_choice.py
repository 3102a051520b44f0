"""Where a run trains: on a card that works and is worth it, or on the CPU."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import torch

from steadyrl.agents.registry import AgentSettings, Compiling
from steadyrl.agents.update_cost import update_cost
from steadyrl.core.errors import one_line
from steadyrl.envs.types import EnvSpec
from steadyrl.training.config.settings import RunSettings
from steadyrl.training.run.hardware import device_error, device_name, has_driver
from steadyrl.training.run.rank_info import RankInfo, rank_info

log = logging.getLogger("steadyrl")

# A core computes some 5e10 a second, so that a smaller update takes it less than 2 ms. A card would
# save most of that, and lose more: launches, copies, and environments and updates as machine code.
WORTHWHILE_FLOP = 100_000_000

# A new process, because whoever has used a card cannot fork workers any more.
PROBE = """
import sys, torch
try:
    torch.ones(1, device=sys.argv[1]).add_(1).item()
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}".splitlines()[0])
"""
PROBE_SECONDS = 120


def choose_device(run: RunSettings, agent: AgentSettings, spec: EnvSpec) -> str:
    """Return the torch name of the device to train on.

    `auto` is a card where there is one that works and is worth it, and says why if it is not. A
    card that was asked for by its name and does not work is refused.
    """
    name, asked = device_name(run.device), run.device
    if asked == "auto" and has_driver() and not torch.backends.cuda.is_built():
        if is_worthwhile(run, agent, spec):
            log.info("training on the CPU: torch %s is built without CUDA", torch.__version__)
        return "cpu"
    if name == "cpu":
        return name
    if asked == "auto" and not is_worthwhile(run, agent, spec):
        log.info("training on the CPU, which is quicker for small networks (device=cuda: the card)")
        return "cpu"
    reason = why_unusable(name, rank_info())
    if reason is None:
        return name
    if asked != "auto":
        raise device_error(asked, f"the card cannot be used ({reason})")
    log.warning("training on the CPU, the card cannot be used: %s", reason)
    return "cpu"


def is_worthwhile(run: RunSettings, agent: AgentSettings, spec: EnvSpec) -> bool:
    """Return whether a card is quicker than the CPU, or other settings ask for one."""
    if run.precision == "tf32" or (isinstance(agent, Compiling) and agent.compile == "cudagraph"):
        return True
    cost = update_cost(agent, spec)
    return cost.convolves or cost.flop >= WORTHWHILE_FLOP


def why_unusable(name: str, here: RankInfo) -> str | None:
    """Return why a card computes nothing (an old driver, no kernels for it); None if it does."""
    if torch.cuda.is_initialized():  # by an earlier run of this process
        return None
    if here.size > 1:
        if here.local_size > torch.cuda.device_count():
            return None  # which is refused for a reason of its own
        name = f"cuda:{here.local_rank}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, name],
            cwd=Path(torch.__file__).parents[1],  # where it finds the same torch
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
            start_new_session=True,  # Ctrl-C is for the run, which ends by itself
        )
    except subprocess.TimeoutExpired:
        return f"it did not answer within {PROBE_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return one_line(lines[-1]) if lines else f"a test of it ended with {done.returncode}"
