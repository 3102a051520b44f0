"""Environments with action masks, provided in each supported way."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SHAPES = {"vector": (2,), "image": (9, 12, 2)}  # channels last


class Masking(gym.Env):
    """Provides a mask by one of three sources; a forbidden action fails an assertion."""

    def __init__(self, source, actions, space):
        self.source, self.actions = source, actions
        self.action_space = spaces.Discrete(actions, start=2)
        self.observation_space = space
        if source == "observation":
            mask = spaces.Box(0, 1, (actions,), np.int8)
            self.observation_space = spaces.Dict({"observation": space, "action_mask": mask})
        if source == "method":
            self.action_masks = self.mask

    def mask(self):
        raise NotImplementedError

    def tell(self, seen):
        mask = self.mask()
        if self.source == "observation":
            return {"observation": seen, "action_mask": mask}, {}
        return seen, {"action_mask": mask} if self.source == "info" else {}

    def validate_allowed(self, action):
        assert self.mask()[action - 2], f"{action} is forbidden"


def foretold(seed, step, actions):
    """Return the mask of an episode's step."""
    mask = np.random.default_rng([seed, step]).random(actions) < 0.3
    mask[(seed + step) % actions] = True
    return mask


class Stamped(Masking):
    """Observes step and seed; masks are predictable, except an invalid one (`fault`) at step 2."""

    def __init__(
        self, source="info", actions=30, kind="vector", length=4, ends="terminated",
        fault=None, strict=False,
    ):  # fmt: skip
        box = spaces.Box(0, 255, SHAPES[kind], np.uint8 if kind == "image" else np.float32)
        super().__init__(source, actions, box)
        self.kind, self.length, self.ends = kind, length, ends
        self.fault, self.strict = fault, strict

    def mask(self):
        mask = foretold(self.seed, self.steps, self.actions).astype(np.int8)
        if self.fault is None or self.steps != 2:
            return mask
        return {
            "nothing": np.zeros(self.actions, np.int8),
            "short": mask[1:],
            "twos": mask * 2,
            "none": None,
            "text": np.array(["yes"] * self.actions),
            "nan": np.full(self.actions, np.nan),
        }[self.fault]

    def seen(self):
        if self.kind == "vector":
            return np.array([self.steps, self.seed], np.float32)
        image = np.full(SHAPES["image"], self.steps, np.uint8)
        image[..., 1] = self.seed
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.steps = seed % 200, 0
        return self.tell(self.seen())

    def step(self, action):
        if self.strict:
            self.validate_allowed(action)
        self.steps += 1
        over = self.steps == self.length
        seen, info = self.tell(self.seen())
        return (
            seen,
            1.0,
            over and self.ends == "terminated",
            over and self.ends != "terminated",
            info,
        )


class Doors(Masking):
    """Rooms in a row: each has 100 doors, 3 unlocked, one of which leads on for a reward of 1.

    Locked doors are masked or, unmasked, cost 1. An episode ends in the last room, or after twice
    as many steps as there are rooms.
    """

    def __init__(self, source="info", doors=100, unlocked=3, rooms=10, punish=False):
        super().__init__(source, doors, spaces.Box(0, 1, (rooms,), np.float32))
        self.rooms, self.punish = rooms, punish
        draw = np.random.default_rng(7)
        self.unlocked = [draw.permutation(doors)[:unlocked] for _ in range(rooms)]

    def mask(self):
        mask = np.zeros(self.actions, np.bool_)
        mask[self.unlocked[min(self.room, self.rooms - 1)]] = True
        return mask

    def seen(self):
        return np.eye(self.rooms + 1, dtype=np.float32)[self.room, : self.rooms]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.room = self.steps = 0
        return self.tell(self.seen())

    def step(self, action):
        if not self.punish:
            self.validate_allowed(action)
        reward = 0.0 if self.mask()[action - 2] else -1.0
        if action - 2 == self.unlocked[self.room][0]:
            self.room, reward = self.room + 1, 1.0
        self.steps += 1
        seen, info = self.tell(self.seen())
        return seen, reward, self.room == self.rooms, self.steps == 2 * self.rooms, info


gym.register("StampedMasks-v0", Stamped)
gym.register("Doors-v0", Doors)
