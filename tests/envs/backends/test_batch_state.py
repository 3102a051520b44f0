"""Vector environments of others: their tensors are read, their state is continued or dropped.

They continue exactly, or begin new episodes: never anything between.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from remote_tensor import Remote
from toy_environments import settings

from steadyrl.envs.factory import build_env
from steadyrl.envs.types import EnvironmentFailedError

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
        more = np.broadcast_to(np.sum(np.asarray(self.more), dtype=np.float64), self.at.shape)
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


class Counted(Walk):
    """NumPy's numbers, whose types decide what is computed with them."""

    def begin(self):
        self.more = self.mean = np.float64(0)
        self.steps, self.odd, self.small = np.uint8(0), np.False_, np.float32(1 / 3)

    def go_on(self):
        self.steps += np.uint8(1)
        self.odd, self.small = ~self.odd, self.small * np.float32(7) % np.float32(1)
        self.mean = self.at.mean()
        self.more = float(self.steps) + 10 * self.odd + self.small + self.mean


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


class Tensors(Walk):
    """A simulator in torch: tensors, their generator and their device."""

    def begin(self):
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self.random = torch.Generator(self.device).manual_seed(int(self.np_random.integers(99)))
        self.speed = torch.zeros(self.num_envs, 2, dtype=self.dtype, device=self.device)
        self.hit, self.more = torch.zeros(self.num_envs, dtype=torch.bool), 0.0

    def go_on(self):
        self.speed += torch.rand(self.speed.shape, generator=self.random, dtype=self.dtype)
        self.hit = self.hit | (self.speed[:, 0] > 2)
        self.more = float(self.speed.sum() + self.hit.sum())


class TensorView(Walk):
    """A tensor that is a part of another."""

    def begin(self):
        self.both = torch.zeros(2, self.num_envs)
        self.more = self.both[0]

    def go_on(self):
        self.both += 1


class TensorOfArray(TensorView):
    """A tensor in the memory of an array."""

    def begin(self):
        self.more = np.zeros(2)
        self.both = torch.from_numpy(self.more)


class MadeTensor(Tensors):
    """A tensor that only a step makes."""

    def go_on(self):
        super().go_on()
        self.part = self.speed.sum(1)


class LateTensor(Walk):
    """A tensor in place of nothing."""

    def begin(self):
        self.more = self.kept = None

    def go_on(self):
        self.kept = torch.ones(2) if self.kept is None else self.kept + 1

    def see(self):
        self.more = 0 if self.kept is None else float(self.kept.sum())
        return super().see()


class Graph(Walk):
    """A tensor whose gradient is followed."""

    def begin(self):
        self.more, self.learned = 0, torch.ones(2, requires_grad=True)


class Engine:
    """An object of an environment, of which only its environment knows what to save."""

    def __init__(self):
        self.states = torch.zeros(4, 2)
        self.speeds = self.states[:, 1:]  # a view


class WithObject(Walk):
    """A simulator that gives no state of its object."""

    def begin(self):
        self.engine, self.more = Engine(), 0.0


class WithEngine(Walk):
    """A simulator that gives its state and takes it."""

    def begin(self):
        self.engine, self.more = Engine(), 0.0

    def go_on(self):
        self.engine.speeds += torch.rand(1, generator=torch.Generator().manual_seed(3))
        self.more += float(self.engine.states.sum())

    def state_dict(self):
        names = "at", "over", "more", "_np_random"
        return {name: getattr(self, name) for name in names} | {"engine": self.engine.states}

    def load_state_dict(self, state):
        self.engine.states.copy_(state.pop("engine"))
        vars(self).update(state)


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


def wrapped_engine(**kwargs):
    return Marking(WithEngine(**kwargs))


EXACT = {"sum": Sum, "bound": Bound, "scalar": Scalar, "counted": Counted,
         "wrapped": wrapped, "plain": Walk,
         "tensors": Tensors, "engine": WithEngine, "wrappedengine": wrapped_engine}  # fmt: skip
OTHERS = {"named": Named, "late": Late, "view": View, "growing": Growing, "spent": Spent,
          "twister": Twister, "tensorview": TensorView, "tensorofarray": TensorOfArray,
          "made": MadeTensor, "latetensor": LateTensor, "graph": Graph,
          "object": WithObject}  # fmt: skip

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
        assert "its state cannot be saved, a resumed run starts new episodes: " in caplog.text
        assert "episodes of all environments cannot be continued" in caplog.text
        assert not after[0][4].any() and after[1][4].all()
        return
    for ours, theirs in zip(after, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Tensorview", "attribute more is a view, which"),
        ("Late", "attribute steps is not there after a reset\n"),
        ("Made", "attribute part is not there after a reset\n"),
        ("Latetensor", "attribute kept is of type Tensor, after a reset of NoneType\n"),
        ("Object", "attribute engine is of type Engine\n"),
    ],
)
def test_the_attribute_that_cannot_be_saved_is_named_with_the_reason(kind, reason, caplog):
    config = settings(f"Walk{kind}-v0", backend="batch", num_envs=ENVS)
    with build_env(config, seed=4) as env:
        env.reset()
        played(env, 2)
        env.state_dict()
    assert reason in caplog.text


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


class Simulator(Walk):
    """A simulator whose observations, rewards, flags and infos are tensors on its device."""

    def __init__(self, num_envs=1, **_):
        super().__init__(num_envs)
        self.single_observation_space = spaces.Dict(policy=self.single_observation_space)

    def see(self):
        return {"policy": torch.from_numpy(super().see()).requires_grad_().as_subclass(Remote)}

    def step(self, actions):
        obs, *parts, _ = super().step(actions)
        reward, over, truncated = (torch.from_numpy(part).as_subclass(Remote) for part in parts)
        info = {"far": reward.abs(), "_far": over, "episode": {"r": reward}}
        return obs, reward, over, truncated, info


def test_tensors_of_a_device_are_read_as_arrays():
    gym.register("WalkRemote-v0", vector_entry_point=Simulator)
    config = {"backend": "batch", "num_envs": ENVS}
    with (
        build_env(settings("WalkPlain-v0", **config), seed=4) as arrays,
        build_env(settings("WalkRemote-v0", **config, info_metrics=("far",)), seed=4) as tensors,
    ):
        np.testing.assert_array_equal(arrays.reset(), tensors.reset())
        episodes = 0
        for _ in range(30):
            expected = arrays.step(np.ones(ENVS, np.int64))
            found = tensors.step(np.ones(ENVS, np.int64))
            for a, b in zip(expected[:5], found[:5], strict=True):
                np.testing.assert_array_equal(a, b)
            for episode in found.episodes:
                assert episode.info["far"] > 9
                episodes += 1
        assert episodes > 3


class Numbers(Walk):
    """Flags are numbers, as those of some simulators on a device."""

    def step(self, actions):
        obs, reward, *flags, info = super().step(actions)
        return (obs, reward, *(flag.astype(np.float32) for flag in flags), info)


class Short(Walk):
    """Returns one value too few, or takes no seed."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return (obs, info) if self.shortens == "step" else (obs,)

    def step(self, actions):
        return super().step(actions)[:4]

    def close(self):
        raise OSError("its connection is lost")


def test_flags_may_be_numbers():
    gym.register("WalkNumbers-v0", vector_entry_point=Numbers)
    config = {"backend": "batch", "num_envs": ENVS}
    with (
        build_env(settings("WalkPlain-v0", **config), seed=4) as flags,
        build_env(settings("WalkNumbers-v0", **config), seed=4) as numbers,
    ):
        np.testing.assert_array_equal(flags.reset(), numbers.reset())
        for _ in range(30):
            expected = flags.step(np.ones(ENVS, np.int64))
            found = numbers.step(np.ones(ENVS, np.int64))
            for a, b in zip(expected[:5], found[:5], strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_wrong_results_are_named_though_closing_fails(method, monkeypatch):
    monkeypatch.setattr(Short, "shortens", method, raising=False)
    gym.register(f"WalkShort{method}-v0", vector_entry_point=Short)
    wrong = settings(f"WalkShort{method}-v0", backend="batch", num_envs=ENVS)
    named = rf"Walk.* {method}\(\) returned .* not \("
    with (
        pytest.raises(EnvironmentFailedError, match=named),
        build_env(wrong, seed=4) as env,
    ):
        env.reset()
        env.step(np.ones(ENVS, np.int64))
