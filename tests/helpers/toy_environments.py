"""Environments with predictable outputs."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from steadyrl.envs.settings import EnvSettings

COUNTER = "toy_environments:Counter-v0"
NO_ACTION = -1.0


class Counter(gym.Env):
    """Counts steps: observes (steps, last action, seed); the reward is the step number.

    The episode length is drawn by its seed unless given. With `ends="both"` an episode is
    terminated and truncated at once.
    """

    opened = 0
    closed = 0

    def __init__(self, length=None, ends="terminated", fail_at_build=None, fail_at_reset=None):
        if fail_at_build is not None and Counter.opened - Counter.closed >= fail_at_build:
            raise RuntimeError("no more of me")
        Counter.opened += 1
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._length, self._ends, self._fail_at_reset = length, ends, fail_at_reset
        self._resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._resets += 1
        if self._resets == self._fail_at_reset:
            raise RuntimeError("cannot reset")
        self._seed = seed % 1000
        self._left = self._length or int(self.np_random.integers(1, 5))
        self._steps, self._action = 0, NO_ACTION
        return self._observation(), {}

    def step(self, action):
        self._steps += 1
        self._left -= 1
        self._action = action
        over = self._left <= 0
        terminated = over and self._ends in ("terminated", "both")
        truncated = over and self._ends in ("truncated", "both")
        said = (
            {"steps": self._steps, "odd": self._steps % 2 == 1, "note": "needs_reset"}
            if over
            else {}
        )
        return self._observation(), float(self._steps), terminated, truncated, said

    def _observation(self):
        return np.array([self._steps, self._action, self._seed], np.float32)

    def close(self):
        Counter.closed += 1


class Tiny(Counter):
    """Observes a product below 1e-38, which is 0 if subnormals are flushed."""

    def _observation(self):
        return np.full(3, 2e-38, np.float32) * np.float32(0.1) + np.array([0, self._steps, 0], "f")


class CounterVector(VectorEnv):
    """The same counter as a batched environment."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs=1, length=3, **_):
        Counter.opened += 1
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = np.zeros(self.num_envs)
        self.before = np.zeros(self.num_envs, np.bool_)
        return self._observe(np.full(self.num_envs, NO_ACTION)), {}

    def step(self, actions):
        over = self.before
        self.count = np.where(over, 0, self.count + 1)
        done = self.count >= self.length + np.arange(self.num_envs)
        self.before = done
        return (
            self._observe(np.where(over, NO_ACTION, actions)),
            np.where(over, 0, self.count),
            done,
            np.zeros_like(done),
            {"steps": np.where(done, self.count, -7), "_steps": done, "odd": self.count % 2 == 1},
        )

    def _observe(self, actions):
        return np.stack([self.count, actions, np.zeros(self.num_envs)], 1).astype(np.float32)

    def close_extras(self, **_):
        Counter.closed += 1


class Faulty(gym.Env):
    """Counts like `Counter`, with a fault at one step while `fuse` is short.

    `fuse` is a file: a fault occurs while its length is below `times`, and appends a byte.
    """

    def __init__(self, fault="none", at=3, fuse=None, times=1, length=10):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._fault, self._at, self._fuse, self._times = fault, at, fuse, times
        self._length = length
        self._trip("constructor")

    def _trip(self, where):
        from fault_kinds import break_down

        if self._fault.split(":")[0] != where or self._burnt() >= self._times:
            return None
        with open(self._fuse, "ab") as file:
            file.write(b"x")
        return break_down(self._fault.split(":")[1])

    def _burnt(self):
        with open(self._fuse, "ab") as file:
            return file.tell()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._trip("reset")
        self._steps = 0
        return np.array([0, 1], np.float32), {}

    def step(self, action):
        self._steps += 1
        row = [np.array([self._steps, 1], np.float32), 1.0, self._steps >= self._length, False, {}]
        if self._steps == self._at:
            change = self._trip("step")
            if change is not None:
                change(row)
        return tuple(row)


ACTIONS = {
    "discrete": spaces.Discrete(5, start=1),
    "multi discrete": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "multi binary": spaces.MultiBinary([2, 3]),
    "box": spaces.Box(-0.3, 0.3, (2, 2), np.float64),
}


class Echo(gym.Env):
    """Observes the action it received."""

    def __init__(self, kind):
        self.action_space = ACTIONS[kind]
        size = max(1, int(np.prod(self.action_space.shape)))
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action) or self.action_space.dtype == np.float64
        return np.float32(action).reshape(-1), 0.0, False, False, {}


def settings(env_id=COUNTER, **changes):
    values = {
        "id": env_id,
        "num_envs": 1,
        "backend": "sync",
        "frame_stack": 1,
        "kwargs": {},
        "wrappers": (),
        "action_masks": "false",
        "image_axes": "auto",
        "image_range": None,
        "step_timeout": 20.0,
        "max_restarts": 0,
        "info_metrics": (),
    }
    return EnvSettings(**{**values, **changes})


class Asserting(Counter):
    """Asserts its render mode, as Gymnasium's tutorial does."""

    metadata = {"render_modes": ["human", "ansi"]}  # noqa: RUF012

    def __init__(self, render_mode=None):
        super().__init__()
        assert render_mode is None or render_mode in self.metadata["render_modes"]


gym.register("Asserting-v0", entry_point=Asserting)
gym.register("Counter-v0", entry_point=Counter, vector_entry_point=CounterVector)
gym.register("OnlyBatch-v0", vector_entry_point=CounterVector)
gym.register("Tiny-v0", entry_point=Tiny)
gym.register("Echo-v0", entry_point=Echo)
gym.register("ToyFaulty-v0", entry_point=Faulty)


class PickyVector(CounterVector):
    """A batched environment that takes no keyword arguments, and raises in its own ways."""

    def __init__(self, num_envs=1, *, harm=None):
        if harm == "exit":
            raise SystemExit(3)
        if harm == "key":
            raise KeyError("a level")
        super().__init__(num_envs)


def plain_counter(harm=None, length=None):
    """Return a counter that accepts these keyword arguments."""
    return Counter(length)


class Doubled(gym.Wrapper):
    """A wrapper named by a registration."""


class Parts(gym.Wrapper):
    """A counter whose observation is two parts: one is NaN at the second step."""

    def __init__(self):
        super().__init__(Counter(length=5))
        boxes = spaces.Box(-np.inf, np.inf, (2, 2)), spaces.Box(-np.inf, np.inf, (3,))
        self.observation_space = spaces.Dict(gear=spaces.Discrete(4), arm=spaces.Tuple(boxes))

    def reset(self, *, seed=None, options=None):
        """Return the first observation."""
        counted, info = self.env.reset(seed=seed)
        return self._parts(counted), info

    def step(self, action):
        """Step the counter."""
        counted, *rest = self.env.step(action)
        return self._parts(counted), *rest

    def _parts(self, counted):
        joints = np.zeros((2, 2), np.float32)
        joints[1, 0] = np.nan if counted[0] == 2 else 0.0
        return {"gear": 3, "arm": (joints, counted)}


gym.register("TwoParts-v0", entry_point=Parts)
gym.register("Picky-v0", entry_point=plain_counter, vector_entry_point=PickyVector)
gym.register(
    "Wrapped-v0",
    entry_point=Counter,
    vector_entry_point=CounterVector,
    additional_wrappers=(Doubled.wrapper_spec(),),
)
