"""Runs of the command in processes forked from one with everything imported.

Imports take seconds. Otherwise runs do not differ from `command.run`: process, output, signals and
exit code are real. Tests of imports or of a process's memory start a new process instead.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
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
    "steadyrl.training.run.collector",
    "steadyrl.agents.engine.cpu.network",
    "steadyrl.agents.engine.cpu.policy",
    "steadyrl.agents.engine.eager",
    "steadyrl.agents.engine.inductor",
    "steadyrl.envs.backends.kernel",
    "steadyrl.envs.kernels.cartpole",
    "gymnasium.envs.classic_control",
)


class Process:
    """A forked run with the interface of `subprocess.Popen` that tests use."""

    def __init__(self, folder, arguments, environment=None, terminal=None):
        """Start it with pipes, or on an open terminal."""
        ends = [os.pipe() for _ in range(3)]
        asked = {"arguments": arguments, "folder": str(folder), "environment": environment or {}}
        request = json.dumps(asked).encode()
        out, err, fate = (write for _, write in ends)
        handles = (out, err, fate) if terminal is None else (terminal, terminal, fate)
        socket.send_fds(nursery(), [request], handles)
        for _, write in ends:
            os.close(write)
        self.stdout, self.stderr, self._fate = (os.fdopen(read) for read, _ in ends)
        self.pid = int(self._fate.readline())
        self.returncode = None

    def is_over(self, within):
        """Wait up to `within` seconds; return whether it has ended."""
        return bool(select.select([self._fate], [], [], within)[0])

    def kill(self):
        """Kill it, unless it has ended."""
        if self.returncode is None and not self.is_over(0):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        """Wait for its end; return its exit code."""
        if self.returncode is None:
            self.returncode = int(self._fate.readline())
            self._fate.close()
        return self.returncode

    def communicate(self):
        """Wait for its end; return its output."""
        # stderr is read second, which is safe because a run prints less to it than a pipe holds.
        out, err = self.stdout.read(), self.stderr.read()
        self.stdout.close()
        self.stderr.close()
        self.wait()
        return out, err


@cache
def nursery():
    """Start the preloaded process; return the socket for requests."""
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
    process.wait()  # daemonised: tests check their children
    atexit.register(ours.close)
    return ours


def start(folder, *overrides, quick=True):
    """Start a run in `folder`."""
    return Process(folder, [*(QUICK if quick else ()), *overrides])


def run(folder, *overrides, code=0, quick=True):
    """Run to the end; return run directory, summary and output."""
    return finished(start(folder, *overrides, quick=quick), folder, code)


def serve(connection):
    """Fork a process per request; return in the forked process."""
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
    """Fork again: the parent reports the child's pid and exit code."""
    child = os.fork()
    if child == 0:
        os.close(fate)
        os.setpgid(0, 0)
        return
    with contextlib.suppress(
        PermissionError
    ):  # the child was faster and has called exec or setpgid
        os.setpgid(child, child)
    for output in (1, 2):
        os.close(output)
    os.write(fate, f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    os.write(fate, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def load():
    """Import what a run needs, and load compiled kernels from their cache."""
    for name in LOADED:
        importlib.import_module(name)
    import numpy as np
    import torch
    import yaml
    from hydra.core.plugins import Plugins

    from steadyrl.agents.registry import ALGORITHMS, agent_class
    from steadyrl.buffers.replay.build import build_replay
    from steadyrl.buffers.replay.settings import ReplaySettings

    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same values, faster
    Plugins.instance()
    for algorithm in ALGORITHMS:
        agent_class(algorithm)
    settings = ReplaySettings(
        capacity=10,
        prioritized=True,
        alpha=0.6,
        beta_start=0.4,
        beta_end=1.0,
        anneal_beta="linear",
        beta_warmup=0.0,
        normalize_weights="replay",
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
        module.unmap_clean_pages = lambda: None  # mapping it again costs a run 0.5 s
    gc.collect()
    gc.freeze()  # collections in a run need not scan all of this


def main(connection):
    """Preload, then become a run at every request."""
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
    if os.isatty(1):
        os.dup2(1, 0)
        sys.stdout.reconfigure(line_buffering=True)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    sys.argv = [str(ROOT / "train.py"), *request["arguments"]]
    sys.path[0] = str(ROOT)
    train.command()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
