"""Signals reach the jobs of a sweep."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from steadyrl.training.run.signals import StoppedError
from steadyrl.training.sweeps.jobs import SweepDirectory, SweepJob
from steadyrl.training.sweeps.watch import forward_signals


@pytest.mark.parametrize(
    ("number", "sent"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
        (signal.SIGUSR2, signal.SIGUSR2),
    ],
)
def test_a_signal_ends_the_jobs_of_its_own_sweep_only(tmp_path, number, sent):
    """Another sweep of the same directory goes on.

    Slurm sends SIGUSR2 to jobs itself: another signal would be a second.
    """
    place, own, children = SweepDirectory(tmp_path), tmp_path / "own", []
    for stop in (own, tmp_path / "other"):
        children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        run_dir = tmp_path / stop.name
        place.write(
            SweepJob(
                stop.name, "", [], "", str(run_dir), status="running", stop=str(stop),
                pid=children[-1].pid, runner=os.getpid(), host=socket.gethostname(),
            )
        )  # fmt: skip
    with forward_signals(place, ["own", "other"], own) as received:
        os.kill(os.getpid(), number)
        assert children[0].wait() == -sent
        assert received == [number]
    children[1].communicate(b"\n")
    assert children[1].returncode == 0


def test_ctrl_c_leaves_jobs_of_slurm_alone(tmp_path, capfd):
    """Those that wait in its queue would find the mark, and do nothing."""
    place, stop = SweepDirectory(tmp_path), tmp_path / "stop"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        place.write(
            SweepJob(
                "own", "", [], "", str(tmp_path / "own"), status="running", stop=str(stop),
                pid=child.pid, runner=os.getpid(), host=socket.gethostname(),
            )
        )  # fmt: skip
        with pytest.raises(StoppedError), forward_signals(place, ["own"], stop, detached=True):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        assert not stop.exists()
        assert "scancel" in capfd.readouterr().out
        child.communicate(b"\n")
    assert child.returncode == 0
