"""Runs of the command in processes of their own that need not import everything again.

One process imports the libraries, which takes seconds, and is forked for every run, which leaves
their programs mapped. Nothing else differs from `command.run`: the process, its output, its signals
and its exit code are real. Tests
that look at imports, or at what memory a process has, start a new one.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
from functools import cache

from command import QUICK, ROOT, environment, finished
from mapped import unmapping

LOADED = (
    "steadyrl.training.logging.tensorboard",
    "torch.fx.experimental.symbolic_shapes",
    "steadyrl.training.cli.main",
    "steadyrl.training.setup",
)


class Process:
    """A forked run, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, folder, arguments, environment=None):
        ends = [os.pipe() for _ in range(3)]
        asked = {"arguments": arguments, "folder": str(folder), "environment": environment or {}}
        request = json.dumps(asked).encode()
        socket.send_fds(nursery(), [request], [write for _, write in ends])
        for _, write in ends:
            os.close(write)
        self.stdout, self.stderr, self._fate = (os.fdopen(read) for read, _ in ends)
        self.pid = int(self._fate.readline())
        self.returncode = None

    def is_over(self, within):
        """Wait for its end, but not longer than so many seconds."""
        return bool(select.select([self._fate], [], [], within)[0])

    def wait(self):
        """Wait for its end."""
        if self.returncode is None:
            self.returncode = int(self._fate.readline())
            self._fate.close()
        return self.returncode

    def communicate(self):
        """Return what it still prints, once it has ended."""
        # A run prints little to stderr: far less than a pipe holds.
        out, err = self.stdout.read(), self.stderr.read()
        self.stdout.close()
        self.stderr.close()
        self.wait()
        return out, err


@cache
def nursery():
    """Start the process that has imported everything; return the way to ask it for runs."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.DEVNULL,
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
    )
    theirs.close()
    process.wait()  # what stays is nobody's child: tests look at the children they have
    atexit.register(ours.close)
    return ours


def start(folder, *overrides, quick=True):
    """Start a run in `folder`."""
    return Process(folder, [*(QUICK if quick else ()), *overrides])


def run(folder, *overrides, code=0, quick=True):
    """Run to the end; return the run directory, its summary, and what was printed."""
    return finished(start(folder, *overrides, quick=quick), folder, code)


def serve(connection):
    """Fork a run for every request; return in the process that is to run it."""
    while True:
        request, outputs, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        if not request:
            sys.exit()
        if os.fork() == 0:
            connection.close()
            break
        for output in outputs:
            os.close(output)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    return json.loads(request), outputs


def supervise(fate):
    """Fork once more: the parent tells of the child's process and of its end."""
    child = os.fork()
    if child == 0:
        os.close(fate)
        os.setpgid(0, 0)
        return
    with contextlib.suppress(PermissionError):  # the child was quicker, and runs already
        os.setpgid(child, child)
    for output in (1, 2):
        os.close(output)
    os.write(fate, f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    os.write(fate, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def load():
    """Import what a run needs, early or late, and read its kernels from their cache."""
    for name in LOADED:
        importlib.import_module(name)
    import numpy as np
    import torch
    from hydra.core.plugins import Plugins

    from steadyrl.buffers.replay.build import build_replay
    from steadyrl.buffers.replay.settings import ReplaySettings

    Plugins.instance()
    settings = ReplaySettings(
        capacity=10,
        prioritized=True,
        alpha=0.6,
        beta_start=0.4,
        beta_end=1.0,
        anneal_beta="linear",
        beta_warmup=0.0,
        device="cpu",
    )
    for dtype in (np.float32, np.uint8):
        replay = build_replay(
            settings, frame_shape=(2,), dtype=np.dtype(dtype), frame_stack=1, num_envs=1,
            n_step=1, gamma=0.9, device=torch.device("cpu"), seed=0,
        )  # fmt: skip
        frame, no = np.zeros((1, 2), dtype), np.zeros(1, bool)
        replay.start(frame)
        for _ in range(3):
            replay.add(np.zeros(1, np.int64), np.zeros(1, np.float32), no, no, ~no, frame)
        batch = replay.sample(1, beta=1.0)
        replay.update_priorities(batch.index, torch.ones(1))
    for module in unmapping():
        module.unmap_clean_pages = lambda: None  # mapping it again takes a run half a second
    gc.collect()
    gc.freeze()  # a collection in a run need not go through all this again


def main(connection):
    """Load everything once, then turn into a run at every request."""
    if os.fork():
        os._exit(0)
    load()
    import steadyrl.loop as train

    request, (out, err, fate) = serve(connection)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    supervise(fate)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    sys.argv = [str(ROOT / "train.py"), *request["arguments"]]
    sys.path[0] = str(ROOT)
    train.command()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
