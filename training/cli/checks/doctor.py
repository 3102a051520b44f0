"""Describe this machine for a bug report, and say what is wrong with it.

python scripts/doctor.py
python scripts/doctor.py --json > report.json
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from steadyrl.core.command.typed import ROOT, installed_version, is_clone
from steadyrl.core.errors import exit_on_error, printable
from steadyrl.core.gates.reference import SWITCH
from steadyrl.training.cli.programs import documented_parser, paragraph
from steadyrl.training.logging.terminal import safe_stdout

PACKAGES = (
    *("torch", "numpy", "numba", "llvmlite", "gymnasium", "hydra-core", "omegaconf"),
    *("tensorboard", "safetensors", "psutil", "rich"),
)
INDENT = 11
FEW_FILES = 1024  # a process of an environment takes 3
LITTLE_MEMORY = 1_000_000_000  # bytes; torch and Numba take 400 MB
LITTLE_DISK = 200_000_000
CHOSEN = f"no: {SWITCH}=eager"
SHARED = Path("/dev/shm")


def examine() -> dict[str, Any]:
    """Return all facts, and under `problems` what is wrong."""
    chosen = dict(os.environ)  # torch sets some
    # Imported here: torch takes seconds, --help none.
    from steadyrl.training.cli.checks.machine import caches, engines, machine, variables
    from steadyrl.training.cli.checks.requirements import extras

    places = caches()  # before torch's compiler is imported, which sets variables
    found, has = machine(), extras()
    facts: dict[str, Any] = {
        "steadyrl": {
            "version": installed_version("steadyrl") or "not installed",
            "place": _place(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: installed_version(name) or "missing" for name in PACKAGES},
        },
        "machine": found,
        "engines": engines(found["gpu"]),
        "caches": places,
        "extras": {
            "installed": [name for name in has if has[name]],
            "missing": [name for name in has if not has[name]],
        },
        "variables": variables(chosen),
    }
    return facts | {"problems": problems(facts)}


def problems(facts: Mapping[str, Any]) -> list[str]:
    """Return what stops or slows runs on this machine, the worst first."""
    from steadyrl.memory.budget import available_bytes
    from steadyrl.memory.process import readable
    from steadyrl.training.cli.checks.requirements import missing, requirements

    found = missing(requirements()[""])
    free = available_bytes()
    if free < LITTLE_MEMORY:
        found.append(f"only {readable(free)} of memory are free for a run")
    gpu = facts["machine"]["gpu"]
    if gpu.startswith("unusable"):
        found.append(f"the GPU is {gpu}: runs take the CPU")
    for name, state in facts["engines"].items():
        if state not in ("yes", CHOSEN) and not (name == "CUDA graphs" and gpu.startswith("none")):
            found.append(f"no {name}: {state.removeprefix('no: ')}")
    if CHOSEN in facts["engines"].values():
        found.append(f"{SWITCH}=eager: the reference engine runs everything, slowly")
    for name, state in facts["caches"].items():
        if not state.endswith("free)"):
            found.append(f"cache of {name}: {state}: nothing is kept there")
    return [*found, *_limits()]


def _limits() -> list[str]:
    found = []
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < FEW_FILES:
        found.append(f"only {files} open files are allowed (ulimit -n)")
    for place, why in ((Path.cwd(), "runs are"), (SHARED, "processes of environments are")):
        with suppress(OSError):
            disk = os.statvfs(place)
            if disk.f_bavail * disk.f_frsize < LITTLE_DISK:
                found.append(f"{place} is almost full: {why} written there")
    if not os.access(Path.cwd(), os.W_OK | os.X_OK):
        found.append(f"{Path.cwd()} cannot be written to: name another place with run_dir=…")
    return found


def _place() -> str:
    if not is_clone():
        return f"installed in {ROOT}"
    commit = ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
        commit = f", commit {done.stdout.strip()}"
    return f"clone in {ROOT}{commit}"


def report(facts: Mapping[str, Any]) -> str:
    """Return the facts as text of 80 columns."""
    engines, wrong = facts["engines"], facts["problems"]
    able = ", ".join(name for name, state in engines.items() if state == "yes")
    unable = [f"no {n}: {s.removeprefix('no: ')}" for n, s in engines.items() if s != "yes"]
    paragraphs = {
        "steadyrl": ["{version}, {place}".format(**facts["steadyrl"])],
        "versions": [", ".join(f"{name} {each}" for name, each in facts["versions"].items())],
        **{name: [text] for name, text in facts["machine"].items()},
        "engines": [able, *unable],
        "caches": [f"{name}: {state}" for name, state in facts["caches"].items()],
        "extras": [", ".join(facts["extras"]["installed"]) or "none"],
        "missing": [", ".join(facts["extras"]["missing"]) or "none"],
        "variables": [" ".join(f"{k}={v}" for k, v in facts["variables"].items()) or "none"],
        "wrong": [f"- {each}" for each in wrong] or ["nothing found"],
    }
    return "\n".join(
        paragraph("" if at else name, text, INDENT)
        for name, texts in paragraphs.items()
        for at, text in enumerate(texts)
    )


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Examine and report; errors are printed as one line."""
    parser = documented_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    with safe_stdout():
        args = parser.parse_args(arguments)
    facts = examine()
    with safe_stdout():
        shown = json.dumps(facts, indent=2) if args.json else report(facts)
        print(printable(shown))
