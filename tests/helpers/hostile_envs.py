"""Environments that harm their process, for `env.id=hostile_envs:Hostile-v0`."""

import contextlib
import ctypes
import importlib
import logging.config
import os
import sys
import threading

import gymnasium as gym
import numpy as np


def torch():
    """Return torch, imported only by the harms that need it."""
    return importlib.import_module("torch")


def fail_with_an_escape_sequence():
    """Raise with a message that would clear the screen."""
    raise RuntimeError("\x1b[2J\x1b]0;owned\x07")


def enter_inference_mode(entered=contextlib.ExitStack()):  # noqa: B008 (kept: its end would leave)
    entered.enter_context(torch().inference_mode())


def configure_logging():
    """Configure the environment's own log, which disables all others and closes their handlers."""
    logging.config.dictConfig({"version": 1, "root": {"level": "WARNING"}})


def leave_a_thread():
    """Leave a thread that never ends, as a simulator's client may."""
    threading.Thread(target=threading.Event().wait, name="simulator").start()


def leave_a_thread_and_fail():
    leave_a_thread()
    raise KeyError("a level")


HARM = {
    "SystemExit": lambda: sys.exit(0),
    "KeyError": lambda: {}["a level"],
    "os._exit": lambda: os._exit(0),
    "native exit": lambda: ctypes.CDLL(None)._exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "log config": configure_logging,
    "log off": lambda: logging.disable(logging.CRITICAL),
    "thread": leave_a_thread,
    "thread, KeyError": leave_a_thread_and_fail,
    "print": lambda: print("hello", flush=True),
    "escape": fail_with_an_escape_sequence,
    "hang": lambda: threading.Event().wait(),
    "gradients": lambda: torch().set_grad_enabled(False),
    "threads": lambda: torch().set_num_threads(3),
    "matmul": lambda: torch().set_float32_matmul_precision("medium"),
    "inference": enter_inference_mode,
    "dtype": lambda: torch().set_default_dtype(torch().float64),
    "device": lambda: torch().set_default_device("meta"),
}


def leave_a_trace():
    """Append the pid to the file $TRACES, to show which processes run this module."""
    if "TRACES" in os.environ:
        with open(os.environ["TRACES"], "a") as file:
            file.write(f"{os.getpid()}\n")


class Hostile(gym.Env):
    """Does one kind of harm in one method: constructor, reset, step (or one in 30) or close."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, where="nowhere", harm="", states=None, numbers=2):
        self.where, self.harm, self.numbers = where, harm, numbers
        if numbers != 2:
            self.observation_space = gym.spaces.Box(-1, 1, (numbers,), np.float32)
        if states is not None:
            self.observation_space = gym.spaces.Discrete(states)
        self.strike("constructor")

    def strike(self, place):
        leave_a_trace()
        if self.where == place:
            HARM[self.harm]()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.strike("reset")
        self.time = 0
        return np.zeros(self.numbers, np.float32), {}

    def step(self, action):
        self.strike("step")
        if self.np_random.random() < 1 / 30:
            self.strike("some steps")
        self.time += 1
        return np.zeros(self.numbers, np.float32), 1.0, self.time >= 20, False, {}

    def close(self):
        self.strike("close")


leave_a_trace()
gym.register("Hostile-v0", Hostile)
