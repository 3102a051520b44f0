"""Train every agent, kill, resume, evaluate, sweep: a short form of the tests for one Python.

PYTHON .ci/short.py, in an environment where the program is installed; takes some minutes at most.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from steadyrl.agents.registry import ALGORITHMS

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 600  # seconds until a step counts as hanging: minutes on a machine that has others to serve
SETTINGS = ("device=cpu", "total_steps=6000", "agent.compile=false", "eval.every=0")


def command(script: str, *arguments: str) -> list[str]:
    """Return the command of one of our programs with this Python."""
    return [sys.executable, str(ROOT / script), *arguments]


def call(script: str, *arguments: str) -> None:
    """Run a program to its end, which has to be a good one."""
    try:
        done = subprocess.run(
            command(script, *arguments), timeout=LIMIT, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"{script} {' '.join(arguments)}: no end within {LIMIT} s")
    if done.returncode != 0:
        sys.exit(f"{script} {' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")


def weights(run: Path) -> str:
    """Return the hash of a finished run's weights."""
    summary = json.loads((run / "summary.json").read_text())
    if summary["status"] != "finished":
        sys.exit(f"{run}: {summary['status']}")
    return str(summary["weights_sha256"])


def kill_after_a_checkpoint(run: Path, *arguments: str) -> None:
    """Start a run and kill it as soon as it has saved."""
    process = subprocess.Popen(command("train.py", *arguments), stderr=subprocess.DEVNULL)
    end = time.monotonic() + LIMIT
    while not any((run / "checkpoints").glob("step-*")):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            sys.exit(f"{run}: nothing was saved")
        time.sleep(0.01)
    process.kill()
    process.wait()
    if (run / "summary.json").exists():
        sys.exit(f"{run}: it had finished before it was killed")


def try_agent(folder: Path, agent: str) -> None:
    """Train, and again with a kill between: the weights are the same; then evaluate them."""
    whole, killed = folder / f"{agent}-whole", folder / f"{agent}-killed"
    told = (f"agent={agent}", *SETTINGS)
    call("train.py", *told, f"run_dir={whole}")
    again = (*told, "checkpoint.every=1000", f"run_dir={killed}", "resume=auto")
    kill_after_a_checkpoint(killed, *again)
    call("train.py", *again)
    if weights(whole) != weights(killed):
        sys.exit(f"{agent}: killed and continued, it has other weights")
    call("scripts/evaluate.py", str(killed), "--episodes", "2")


def main() -> None:
    """Try all of it in a folder that is left to nobody."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for agent in ALGORITHMS:
            try_agent(folder, agent)
        sweep = (f"hydra.sweep.dir={folder / 'sweep'}", f"agent={','.join(ALGORITHMS)}", *SETTINGS)
        call("train.py", "-m", *sweep, "total_steps=2000")
        if len(list((folder / "sweep").rglob("summary.json"))) != len(ALGORITHMS):
            sys.exit("the sweep did not end with a run for each algorithm")
    print(f"trained, killed, continued, evaluated and swept with Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
