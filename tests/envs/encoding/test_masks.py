"""Action masks from info, observation or method are appended to observations as bits."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import settings as searched
from hypothesis import strategies as st
from masked_envs import Stamped, foretold
from odd_actions import Odd
from toy_environments import Counter, settings

from steadyrl.agents.networks.action_mask import Masks
from steadyrl.core.errors import SettingError
from steadyrl.envs.encoding.first_reset import first_info
from steadyrl.envs.encoding.masks import find_masks, mask_encoder
from steadyrl.envs.encoding.spaces import observation_encoder
from steadyrl.envs.factory import build_env, choose_backend, probe
from steadyrl.envs.kernels.api import BUILTIN_KERNELS
from steadyrl.envs.types import DiscreteActions, EnvironmentFailedError, EnvSpec

CPU = torch.device("cpu")
STAMPED = "masked_envs:StampedMasks-v0"
SOURCES = ("info", "observation", "method")


def stamped(source="info", *, masks="true", stack=1, backend="sync", num_envs=2, **kwargs):
    kwargs = {"source": source, **kwargs}
    return settings(
        STAMPED, action_masks=masks, frame_stack=stack, backend=backend, num_envs=num_envs,
        kwargs=kwargs,
    )  # fmt: skip


SPACES = {
    "numbers": spaces.Box(-1, 1, (3,), np.float32),
    "one-hot": spaces.Discrete(5),
    "both": spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-9, 9, (2, 2))}),
    "bytes": spaces.Box(0, 255, (4,), np.uint8),
    "image": spaces.Box(0, 255, (5, 3, 2), np.uint8),
    "channels first": spaces.Box(0, 255, (1, 8, 9), np.uint8),
    "board": spaces.Box(0, 1, (10, 10, 4), np.bool_),
}


@searched(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SPACES)), st.integers(1, 200), st.integers(1, 3), st.integers(0, 999))
def test_masks_and_features_are_decoded_exactly(kind, actions, stack, seed):
    random = np.random.default_rng(seed)
    plain = observation_encoder(SPACES[kind])
    encoder = mask_encoder(plain, actions)
    spec = EnvSpec(
        "Any", 1, encoder.shape, encoder.dtype, stack, DiscreteActions(actions), (), encoder.mask
    )
    assert spec.unmasked_shape == (stack * plain.shape[0], *plain.shape[1:])
    SPACES[kind].seed(seed)
    frames = []
    for _ in range(stack):
        observation, allowed = SPACES[kind].sample(), random.random(actions) < 0.5
        masked, unmasked = (np.full(e.shape, 7, e.dtype) for e in (encoder, plain))
        encoder.write((observation, allowed), masked)
        plain.write(observation, unmasked)
        frames.append((masked, unmasked))
    encoded, seen = (np.concatenate(each)[None] for each in zip(*frames, strict=True))
    masks, obs = Masks.of(spec, CPU), torch.from_numpy(encoded)
    assert masks.allowed(obs)[0].tolist() == allowed.tolist()
    assert torch.equal(masks.features(obs), torch.from_numpy(seen))
    if obs.dim() == 2:
        other = masks.replace_features(torch.from_numpy(seen) + 1, obs)
        assert torch.equal(masks.allowed(other), masks.allowed(obs))
        assert torch.equal(masks.features(other), torch.from_numpy(seen) + 1)


def allowed_by(spec, obs):
    return Masks.of(spec, CPU).allowed(torch.from_numpy(obs)).numpy()


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("kind", "stack", "ends"), [("vector", 2, "terminated"), ("image", 1, "truncated")]
)
def test_every_observation_has_its_own_mask(source, backend, kind, stack, ends):
    config = stamped(source, backend=backend, stack=stack, kind=kind, ends=ends, strict=True)
    channels, random = 2 * stack, np.random.default_rng(0)
    with build_env(config, seed=3) as env:
        spec, masks = env.spec, Masks.of(env.spec, CPU)
        obs, lengths = env.reset(), np.zeros(2, int)
        for t in range(12):
            seen = masks.features(torch.from_numpy(obs)).numpy()
            allowed = masks.allowed(torch.from_numpy(obs)).numpy()
            newest = seen.reshape(2, channels, -1)[:, -2:, 0]  # each frame holds step and seed
            for steps, seed, mask, length in zip(*newest.T, allowed, lengths, strict=True):
                assert steps == length
                over = (
                    length == 4 and ends == "terminated"
                )  # terminal observations allow all actions
                expected = np.ones(30, bool) if over else foretold(int(seed), int(steps), 30)
                assert mask.tolist() == expected.tolist(), t
            action = [random.choice(np.flatnonzero(mask)) for mask in allowed]
            step = env.step(np.array(action))
            obs, lengths = step.obs, np.where(step.valid, lengths + 1, 0)
        assert (lengths < 5).all() and spec.mask == 2 - (kind == "image")


@pytest.mark.parametrize("source", SOURCES)
def test_auto_finds_masks_and_false_ignores_them(source):
    found = {masks: probe(stamped(source, masks=masks)) for masks in ("auto", "true", "false")}
    assert found["auto"] == found["true"] and found["auto"].mask == 2
    assert found["auto"].frame_shape == (4,) and found["auto"].unmasked_shape == (2,)
    # With "false" a mask in the observation is an ordinary part of it.
    assert found["false"].mask == 0
    assert found["false"].frame_shape == (32 if source == "observation" else 2,)
    for masks in ("auto", "true", "false"):
        with build_env(stamped(source, masks=masks), seed=0) as env:
            assert env.spec == found[masks]


def test_a_non_callable_action_masks_attribute_is_ignored(monkeypatch):
    monkeypatch.setattr(Counter, "action_masks", None, raising=False)
    with build_env(settings("toy_environments:Counter-v0", action_masks="auto"), seed=0) as env:
        assert env.reset().shape == (1, 3)


class Misspelt(gym.Env):
    """Has what may be a mask of three actions under this key, of `info` or the observation."""

    action_space = spaces.Discrete(3)

    def __init__(self, key, size=3, where="info"):
        self.info = {key: np.ones(size, np.int8)} if where == "info" else {}
        parts = {"obs": spaces.Box(-1, 1, (2,)), key: spaces.MultiBinary(size)}
        plain = where == "info"
        self.observation_space = parts["obs"] if plain else spaces.Dict(parts)

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(0)
        return self.observation_space.sample(), self.info


gym.register("MisspeltMask-v0", Misspelt)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"key": "action_masks"}, "info['action_masks']"),
        ({"key": "legal_actions"}, "info['legal_actions']"),
        ({"key": "action_mask", "where": "observation"}, "observation['action_mask']"),
        ({"key": "action_masks", "size": 4}, None),
        ({"key": "other"}, None),
    ],
)
def test_what_looks_like_a_mask_and_is_none_is_named_once(caplog, backend, kwargs, named):
    found = settings("MisspeltMask-v0", action_masks="auto", backend=backend, kwargs=kwargs)
    assert probe(found).mask == 0
    lines = [record.message for record in caplog.records]
    assert lines == [] if named is None else len(lines) == 1 and named in lines[0]
    if named is not None:
        assert "masks are info['action_mask']" in lines[0]
    probe(found.with_masks(False))
    assert len(caplog.records) == len(lines)


class SeedDeaf(gym.Env):
    """Draws its first observation from its seed, or from a generator of its own.

    That heeds a seed only with `if_seed`, and not the seed 0.
    """

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 1, (2,))

    def __init__(self, own=True, if_seed=False, fails=False):
        self.own, self.fails = np.random.default_rng() if own else None, fails
        self.if_seed = if_seed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fails:
            raise OSError("no display")
        if self.if_seed and seed:
            self.own = np.random.default_rng(seed)
        generator = self.own or self.np_random
        return generator.random(2).astype(np.float32), {}


gym.register("SeedDeaf-v0", SeedDeaf)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({}, True),
        ({"own": False}, False),
        ({"if_seed": True}, False),
        ({"fails": True}, False),
    ],
)
def test_a_seed_without_effect_is_named(caplog, backend, kwargs, named):
    probe(settings("SeedDeaf-v0", action_masks="auto", backend=backend, kwargs=kwargs))
    line = "SeedDeaf-v0: reset(seed=1) gives another observation the second time"
    assert [r.message.startswith(line) for r in caplog.records] == [True] * named


class Listed(gym.Env):
    """Returns a Tuple's parts as a list; the last one, a tensor, may not be copied or compared."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,))))

    def __init__(self, tensor):
        weight = torch.ones(2, requires_grad=True)
        self.observation = [1, 0.5 * weight if tensor else np.ones(2, np.float32)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation, {}


gym.register("Listed-v0", Listed)


@pytest.mark.parametrize("tensor", [False, True])
def test_observations_that_cannot_be_compared_are_not_remarked_on(caplog, tensor):
    spec = probe(settings("Listed-v0", action_masks="auto", kwargs={"tensor": tensor}))
    assert spec.observation_shape == (5,)
    assert not caplog.records


class Pictured(gym.Env):
    """Beside its mask an observation of a picture and a vector."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(
        observation=spaces.Dict(
            picture=spaces.Box(0, 255, (10, 10, 1), np.uint8), way=spaces.Box(-1, 1, (3,))
        ),
        action_mask=spaces.Box(0, 1, (2,), np.int8),
    )


gym.register("Pictured-v0", Pictured)


def test_parts_beside_a_mask_are_not_kept_by_a_wrapper_that_does_not_see_them():
    own = "a wrapper of your own in env.wrappers that keeps 'picture' or 'way'"
    ways = f"Use env.image_axes=vector for all parts as one vector; or {own}"
    with pytest.raises(SettingError, match="an image 'picture' among its parts") as caught:
        probe(settings("Pictured-v0", action_masks="auto"))
    assert caught.value.reason.endswith(ways)


class MaskFromStepOnly(gym.Env):
    """Gives no mask in reset, so that none is found."""

    observation_space = spaces.Box(-1, 1, (2,))

    def __init__(self, joint=False):  # masks of joint actions are never used
        self.action_space = spaces.MultiDiscrete([3]) if joint else spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {"action_mask": np.ones(3, np.int8)}


gym.register("MaskFromStepOnly-v0", MaskFromStepOnly)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("masks", "joint", "named"), [("auto", False, 1), ("auto", True, 0), ("false", False, 0)]
)
def test_masks_that_only_step_gives_are_named_once(caplog, backend, masks, joint, named):
    kwargs = {"joint": joint}
    config = settings("MaskFromStepOnly-v0", action_masks=masks, backend=backend, kwargs=kwargs)
    with build_env(config, seed=0) as env:
        env.reset()
        for _ in range(3):
            env.step(np.zeros((1, 1) if joint else 1, np.int64))
    lines = [record.message for record in caplog.records]
    assert sum("comes from step() but not from reset()" in line for line in lines) == named


def test_auto_finds_no_masks_and_true_is_rejected():
    plain = probe(settings(num_envs=2, action_masks="false"))
    assert probe(settings(num_envs=2, action_masks="auto")) == plain
    with pytest.raises(SettingError, match=r"action_masks=true: .* provides none: no info"):
        probe(settings(action_masks="true"))
    for env_id in ("toy_environments:Echo-v0", "Pendulum-v1"):
        config = settings(env_id, kwargs={"kind": "box"} if "Echo" in env_id else {})
        config = config.with_masks(True)
        with pytest.raises(
            SettingError, match=r"masks need Discrete actions, but .* has Box actions"
        ):
            probe(config)
        with pytest.raises(SettingError, match="masks need Discrete actions"):
            build_env(config, seed=0)


def test_batched_backends_are_not_used_with_masks():
    taxi = settings("Taxi-v4", backend="auto", action_masks="auto")
    with build_env(taxi.with_masks(True), seed=0) as env:
        assert env.spec.mask == 1 and env.spec.unmasked_shape == (500,)
    for backend in ("kernel", "batch"):
        config = settings("CartPole-v1", backend=backend, action_masks="true")
        with pytest.raises(SettingError, match=f"action_masks=true: backend {backend} steps all"):
            probe(config)


@pytest.mark.parametrize("num_envs", [1, 8])
def test_auto_keeps_masks_although_a_kernel_exists(num_envs):
    specs = {
        backend: probe(settings("Taxi-v4", num_envs=num_envs, backend=backend, action_masks="auto"))
        for backend in ("auto", "sync")
    }
    assert specs["auto"] == specs["sync"]
    assert specs["auto"].mask == 1
    for masks, kernel in (("auto", False), ("true", False), ("false", True)):
        taxi = settings("Taxi-v4", num_envs=num_envs, backend="auto", action_masks=masks)
        assert (choose_backend(taxi)[0] == "kernel") is kernel


def test_kernels_declare_the_masks_of_their_environments():
    """A kernel that did not declare its environment's masks would be trained without them."""
    for env_id in sorted(gym.registry):
        kernel = BUILTIN_KERNELS.get(gym.registry[env_id].entry_point)
        if kernel is not None and not gym.registry[env_id].additional_wrappers:
            has_masks = probe(settings(env_id, backend="sync", action_masks="auto")).mask > 0
            assert has_masks is kernel.masks, env_id


def test_a_configured_kernel_without_masks_is_warned_of(caplog):
    assert probe(settings("Taxi-v4", backend="kernel", action_masks="auto")).mask == 0
    assert "provides action masks, env.backend=kernel does not" in caplog.text
    caplog.clear()
    probe(settings("Taxi-v4", backend="kernel", action_masks="false"))
    probe(settings("CartPole-v1", backend="kernel", action_masks="auto"))
    assert caplog.text == ""


FAULTS = pytest.mark.parametrize(
    ("backend", "source", "fault", "message"),
    [
        ("sync", "info", "nothing", r"info\['action_mask'\] allows no action at all"),
        ("async", "info", "nothing", r"info\['action_mask'\] allows no action at all"),
        (
            "sync",
            "observation",
            "short",
            r"observation\['action_mask'\] has shape \(29,\), there are 30",
        ),
        ("async", "method", "twos", r"action_masks\(\) holds other values than 0 and 1: \[.*2"),
        ("sync", "info", "none", r"has shape \(\), there are 30 actions"),
        ("sync", "method", "text", r"other values than 0 and 1"),
        ("sync", "info", "nan", r"other values than 0 and 1"),
    ],
)


@FAULTS
def test_invalid_masks_raise_with_environment_and_step(backend, source, fault, message):
    config = stamped(source, backend=backend, fault=fault, length=9, num_envs=1)
    with build_env(config, seed=0) as env:
        env.reset()
        env.step(np.zeros(1, np.int64))
        with pytest.raises(
            EnvironmentFailedError, match=f"environment 0 failed at step 1: .*{message}"
        ):
            env.step(np.zeros(1, np.int64))
    assert EnvironmentFailedError.exit_code == 4


def test_an_invalid_mask_rebuilds_the_environment():
    config = stamped(fault="nothing", length=9)
    config = settings(**vars(config) | {"max_restarts": 2, "env_id": STAMPED})
    with build_env(config, seed=0) as env:
        env.reset()
        env.step(np.zeros(2, np.int64))
        step = env.step(np.zeros(2, np.int64))
        assert step.valid.tolist() == [False, False]
        assert allowed_by(env.spec, step.obs).any(axis=1).all()


def test_a_missing_mask_raises():
    config = settings(action_masks="true")
    with (
        build_env(config, seed=0) as env,
        pytest.raises(EnvironmentFailedError, match=r"info\['action_mask'\] is missing"),
    ):
        env.reset()


def test_a_mask_space_of_another_size_is_rejected(monkeypatch):
    def narrow(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.action_space = spaces.Discrete(7)

    build = Stamped.__init__
    monkeypatch.setattr(Stamped, "__init__", narrow)
    with pytest.raises(SettingError, match=r"has shape \(30,\), there are 7 actions"):
        probe(stamped("observation", masks="auto"))


@pytest.mark.parametrize("source", SOURCES)
def test_restored_episodes_have_the_same_masks(source):
    config = stamped(source, length=50, stack=2)
    with build_env(config, seed=7) as one, build_env(config, seed=8) as other:
        one.reset()
        for _ in range(5):
            one.step(np.zeros(2, np.int64))
        other.load_state_dict(one.state_dict())
        np.testing.assert_array_equal(one.observation, other.observation)
        np.testing.assert_array_equal(*(e.step(np.zeros(2, np.int64)).obs for e in (one, other)))


@pytest.mark.parametrize(
    ("kind", "masked", "said"),
    [
        ("several", True, "info['action_mask'] is not used: only Discrete actions are masked, and"),
        ("binary", True, "these are MultiBinary"),
        ("several", False, None),
        ("narrow", True, None),
    ],
)
def test_masks_of_several_actions_are_remarked_on(kind, masked, said):
    env, found, auto = Odd(kind, masked), [], settings("Odd-v0", action_masks="auto")
    assert find_masks(env, auto, found.append) is None
    assert [said in line for line in found] == ([True] if said else [])
    found.clear()
    env.action_masks = lambda: np.ones(6)
    assert find_masks(env, auto, found.append) is None
    own = "action_masks() is not used: only Discrete actions are masked, and these are Multi"
    assert [line.startswith(own) for line in found] == ([True] if kind != "narrow" else [])


class Unwilling(gym.Env):
    """Raises at the resets of these numbers, the first being 1."""

    def __init__(self, *raises):
        self.raises, self.resets = raises, 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        if self.resets in self.raises:
            raise AssertionError("not within an episode")
        return np.zeros(1), {"action_mask": np.ones(3)}


@pytest.mark.parametrize(("raises", "keys"), [((2,), ["action_mask"]), ((1,), [])])
def test_a_mask_is_found_though_the_next_reset_fails(raises, keys):
    remarks = []
    assert [*first_info(Unwilling(*raises), remarks.append)] == keys
    assert remarks == []
