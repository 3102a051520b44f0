"""An environment that starts subprocesses and does not end them."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess

import gymnasium as gym
import numpy as np

FAMILY = "family_env:Family-v0"


class Family(gym.Env):
    """Starts a program and a forked process, and appends their pids to a file."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, register):
        program = subprocess.Popen(["sleep", "1000"])
        fork = multiprocessing.get_context("fork").Process(target=signal.pause)
        fork.start()
        with open(register, "a") as file:
            file.write(f"{program.pid} {fork.pid}\n")
        self.parts = (program, fork)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Ended(Family):
    """Ends a forked process and a program by signals, and appends how they ended to a file."""

    def __init__(self, register):
        forked = multiprocessing.get_context("fork")
        runs = forked.Event()
        fork = forked.Process(target=lambda: (runs.set(), signal.pause()))
        fork.start()
        runs.wait()
        fork.terminate()
        fork.join()
        program = subprocess.run(["sh", "-c", "kill -INT $$"])
        with open(register, "a") as file:
            file.write(f"{fork.exitcode} {program.returncode}\n")


class Daemons(Family):
    """Starts daemons: orphaned processes in sessions of their own."""

    def __init__(self, register):
        with open(register, "a") as file:
            file.write(f"{daemon('sleep')} {daemon(None)}\n")

    def step(self, action):
        while action == 1:
            signal.pause()
        return super().step(action)


def daemon(program):
    """Start an orphaned process; return its pid."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(write, f"{os.getpid()}".encode())
            os.execlp(program, program, "1000") if program else signal.pause()
        os._exit(0)
    os.waitpid(child, 0)
    number = os.read(read, 20).decode()
    os.close(read)
    os.close(write)
    return number


class Calling(Family):
    """The `at`-th one built sends signal `number` to its parent process."""

    def __init__(self, register, at, number):
        with open(register, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two could count the same number otherwise
            file.seek(0, os.SEEK_END)
            file.write(b"x")
            built = file.tell()
        if built == at:
            os.kill(os.getppid(), number)


gym.register("Family-v0", Family)
gym.register("Ended-v0", Ended)
gym.register("Daemons-v0", Daemons)
gym.register("Calling-v0", Calling)
