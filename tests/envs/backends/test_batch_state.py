"""Vector environments of others continue exactly, or begin new episodes: never anything between."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from toy_environments import settings

from steadyrl.envs.factory import build_env

ENVS = 3


class Walk(VectorEnv):
    """Random walks of which every attribute that a subclass adds shows in the observations."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs=1, **_):
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = spaces.Box(-np.inf, np.inf, (num_envs, 2), np.float32)
        self.action_space = spaces.MultiDiscrete([3] * num_envs)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.over = np.zeros(self.num_envs), np.zeros(self.num_envs, np.bool_)
        self.begin()
        return self.see(), {}

    def step(self, actions):
        moved = self.at + actions + self.np_random.normal(size=self.num_envs)
        self.at = np.where(self.over, 0.0, moved)
        self.over = np.abs(self.at) > 9
        self.go_on()
        return self.see(), self.at.copy(), self.over.copy(), np.zeros_like(self.over), {}

    def begin(self):
        self.more = 0

    def go_on(self):
        self.more += 1

    def see(self):
        more = np.broadcast_to(np.sum(self.more, dtype=np.float64), self.at.shape)
        return np.stack([self.at, more], 1).astype(np.float32)


class Sum(Walk):
    """A number that begins as an integer."""

    def go_on(self):
        self.more += 0.25


class Bound(Walk):
    """A number without a bound that no observation shows, and an array of such."""

    def begin(self):
        self.more, self.most, self.least = 0, -np.inf, np.full(self.num_envs, np.inf)

    def go_on(self):
        self.most, self.least = max(self.most, self.at.max()), np.minimum(self.least, self.at)
        self.more = self.most


class Scalar(Walk):
    """An array without axes."""

    def begin(self):
        self.more = np.array(0.0)

    def go_on(self):
        self.more[()] += 1


class Named(Walk):
    """An array of text."""

    def begin(self):
        self.more, self.names = 0, np.array(["left", "stay", "right"])


class Late(Walk):
    """An attribute that only a step makes."""

    def see(self):
        self.more = getattr(self, "steps", 0)
        return super().see()

    def go_on(self):
        self.steps = self.more + 1


class View(Walk):
    """An array that is a part of another."""

    def begin(self):
        self.both = np.zeros((2, self.num_envs))
        self.more = self.both[0]

    def go_on(self):
        self.both += 1


class Growing(Walk):
    """An array that becomes longer."""

    def begin(self):
        self.more = np.zeros(2)

    def go_on(self):
        self.more = np.append(self.more, 1.0)


class Spent(Walk):
    """An array that a step takes away."""

    def begin(self):
        self.more, self.gift = 0, np.ones(2)

    def go_on(self):
        self.more += 1 if self.gift is None else self.gift.sum()
        self.gift = None


class Twister(Walk):
    """A generator of another kind."""

    def begin(self):
        self.more, self.random = 0, np.random.Generator(np.random.MT19937(0))

    def go_on(self):
        self.more = int(self.random.integers(9))


class Marking(VectorWrapper):
    """A wrapper with a state of its own."""

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        self.steps += 1
        obs, *rest = super().step(actions)
        obs[:, 1] += 100 * self.steps
        return obs, *rest


def wrapped(**kwargs):
    return Marking(Marking(Sum(**kwargs)))


EXACT = {"sum": Sum, "bound": Bound, "scalar": Scalar, "wrapped": wrapped, "plain": Walk}
OTHERS = {"named": Named, "late": Late, "view": View, "growing": Growing, "spent": Spent,
          "twister": Twister}  # fmt: skip

for kind, make in (EXACT | OTHERS).items():
    gym.register(f"Walk{kind.title()}-v0", vector_entry_point=make)


def played(env, timesteps):
    return [
        [part.copy() for part in env.step(np.ones(ENVS, np.int64))[:5]] for _ in range(timesteps)
    ]


@pytest.mark.parametrize("kind", EXACT | OTHERS)
def test_an_environment_continues_exactly_or_begins_new_episodes(kind, caplog):
    config = settings(f"Walk{kind.title()}-v0", backend="batch", num_envs=ENVS)
    with build_env(config, seed=4) as one, build_env(config, seed=4) as other:
        one.reset()
        played(one, 5)
        state = one.state_dict()
        expected = played(one, 30)
        other.load_state_dict(state)
        after = played(other, 30)
    if kind in OTHERS:
        assert "episodes of all environments cannot be continued" in caplog.text
        assert not after[0][4].any() and after[1][4].all()
        return
    for ours, theirs in zip(after, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "value"), [("more", "text"), ("more", float("nan")), ("at", None), ("other", 1)]
)
def test_impossible_attributes_are_refused(name, value):
    config = settings("WalkSum-v0", backend="batch", num_envs=ENVS)
    with build_env(config, seed=4) as env:
        env.reset()
        state = env.state_dict()
        state["backend"]["simulator"][name] = value
        with pytest.raises(ValueError, match=f"simulator.*{name}"):
            env.load_state_dict(state)
