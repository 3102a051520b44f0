"""Environments that violate Gymnasium's interface, each in one way."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Odd(gym.Env):
    """Follows the interface except in one way.

    `fuse` is a file that grows by a byte per construction: some faults start after `before` of
    them.
    """

    def __init__(self, odd="", fuse=None, before=1, length=30):
        self.odd, self.length = odd, length
        built = 0
        if fuse is not None:
            with open(fuse, "ab") as file:
                built = file.tell()
                file.write(b"x")
        self.again = built >= before and odd.startswith("other")
        width = 1 if self.again and odd == "other shape" else 4
        bound = 2 if self.again and odd == "other bounds" else 1
        self.observation_space = spaces.Box(-bound, bound, (width,), np.float32)
        if odd == "other print options":
            high = np.linspace(1, 2, width, dtype=np.float32)
            self.observation_space = spaces.Box(-high, high)
        if odd == "no metadata":
            self.metadata = None
        if odd.startswith("parts"):
            self.observation_space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)})
        self.action_space = spaces.Discrete(3 if self.again and odd == "other actions" else 2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.odd == "seed: overflow":
            np.int32(seed or 0)
        if self.odd == "seed: type" and (seed or 0) >= 2**31:
            raise TypeError("reset(): incompatible function arguments")  # as pybind11
        self.time = 0
        return {
            "reset: no info": lambda: np.zeros(4, np.float32),
            "reset: three values": lambda: (self._see(), {}, {}),
            "reset: info is a list": lambda: (self._see(), []),
            "reset: other shape": lambda: (np.zeros(3, np.float32), {}),
            "reset: outside": lambda: (self._see() + 5, {}),
        }.get(self.odd, lambda: (self._see(), {}))()

    def _see(self):
        if isinstance(self.observation_space, spaces.Dict):
            return {"a": 0, "c" if self.time > 12 else "b": 1}
        return np.zeros(self.observation_space.shape, np.float32)

    def step(self, action):
        self.time += 1
        if self.odd.startswith("other") and not self.again and self.time == 3:
            np.set_printoptions(precision=2)
            raise RuntimeError("broken")
        row = [self._see(), 1.0, self.time >= self.length, False, {}]
        late = self.time > 12
        return {
            "step: four values": lambda: (*row[:3], {}),
            "step: a list": lambda: row,
            "step: info is none": lambda: (*row[:4], None),
            "step: info is none, late": lambda: (*row[:4], None if row[2] else {}),
            "step: two flags": lambda: (*row[:2], np.array([row[2]] * 2), *row[3:]),
            "step: other shape, late": lambda: (row[0][: 3 if late else 4], *row[1:]),
            "step: text": lambda: ("left", *row[1:]),
            "step: text flag": lambda: (*row[:2], "False", *row[3:]),
            "step: outside": lambda: (row[0] + 5, *row[1:]),
            "step: doubles": lambda: (row[0].astype(np.float64), *row[1:]),
            "step: whole flag": lambda: (*row[:2], int(row[2]), *row[3:]),
            "reward: text": lambda: (row[0], "3", *row[2:]),
            "reward: none": lambda: (row[0], None, *row[2:]),
            "reward: none, late": lambda: (row[0], None if late else 1.0, *row[2:]),
            "reward: array": lambda: (row[0], np.ones(2), *row[2:]),
            "reward: one element": lambda: (row[0], np.ones((1, 1)), *row[2:]),
            "reward: one tensor": lambda: (row[0], _one_tensor(), *row[2:]),
            "reward: truth": lambda: (row[0], True, *row[2:]),
        }.get(self.odd, lambda: tuple(row))()


def _one_tensor():
    import torch

    return torch.ones(1)


gym.register("Odd-v0", Odd)
gym.register("OddBare-v0", Odd, order_enforce=False)
