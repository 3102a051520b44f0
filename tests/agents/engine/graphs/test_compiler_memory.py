"""Where the compiler does not fit into memory, it is not started, or is ended."""

import json
import subprocess
import sys
import time

import pytest
from control_groups import train_within

from steadyrl.agents.engine.graphs.compiler_memory import COMPILER_BYTES, compiler_within_memory
from steadyrl.core.gates.gate import Unsupported
from steadyrl.memory.bounds import Bound, margin_of

GB = 1_000_000_000


def with_free(nbytes):
    """Return a bound with so many bytes left below its margin."""
    return Bound("cgroup limit 8 GB", 8 * GB, 8 * GB - margin_of(8 * GB) - nbytes)


def test_a_compiler_that_does_not_fit_is_not_started():
    started = []
    with (
        pytest.raises(Unsupported, match=r"compiling takes 500 MB and 499 MB are left \(cgroup"),
        compiler_within_memory(lambda: with_free(COMPILER_BYTES - 1_000_000)),
    ):
        started.append(True)
    assert not started


def test_a_compiler_that_fits_runs_undisturbed():
    with compiler_within_memory(lambda: with_free(COMPILER_BYTES)):
        assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout


def test_errors_of_the_compiler_pass():
    with (
        pytest.raises(ValueError, match="its own"),
        compiler_within_memory(lambda: with_free(GB)),
    ):
        raise ValueError("its own")


def test_processes_of_a_compiler_are_ended_when_memory_ends():
    """Another process, which was there before, stays."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    readings = iter([with_free(GB)])
    bystander = subprocess.Popen(sleep)
    try:
        with (
            pytest.raises(Unsupported, match="memory ran out while compiling"),
            compiler_within_memory(lambda: next(readings, with_free(-margin_of(8 * GB)))),
        ):
            subprocess.run(sleep, check=True)  # as the compiler runs its children
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.long
@pytest.mark.machinery
def test_a_run_whose_compiler_does_not_fit_goes_on_eagerly(tmp_path):
    """The run fits into the group, the compiler does not; no cache has this network."""
    begin = time.time_ns()
    ran = train_within(
        500_000_000,
        tmp_path,
        *("agent=dqn", "env=cartpole", "total_steps=300", "agent.compile=true", "eval.every=0"),
        *(f"agent.hidden=[{17 + begin % 13},19]", "agent.learning_starts=100"),
        *("agent.batch_size=21", "device=cpu"),
    )
    assert ran.returncode == 0, ran.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["updates"] > 100
    log = (tmp_path / "run/train.log").read_text()
    assert log.count("compiling takes 500 MB and ") == 1 and "updates run eagerly" in log
