"""Every backend encodes observations in the same way, for every space."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from example_spaces import LENGTH, SPACES, sample
from toy_environments import settings

from steadyrl.envs.encoding.spaces import observation_encoder
from steadyrl.envs.factory import build_env, probe

ENVS = 2


def frame(space, observation):
    encoder = observation_encoder(space)
    encoded = np.zeros(encoder.shape, encoder.dtype)
    encoder.write(observation, encoded)
    return encoded


@pytest.mark.parametrize("backend", ["sync", "async", "batch"])
@pytest.mark.parametrize("kind", SPACES)
def test_environments_return_the_encoded_observation(backend, kind):
    config = settings("example_spaces:Show-v0", backend=backend, kwargs={"kind": kind})
    expected = [frame(SPACES[kind], sample(kind, 0, step)) for step in range(LENGTH + 1)]
    with build_env(config, seed=0, num_envs=ENVS) as env:
        assert env.spec.frame_shape == probe(config).frame_shape == expected[0].shape
        assert env.spec.dtype == probe(config).dtype == expected[0].dtype
        np.testing.assert_array_equal(env.reset(), [expected[0]] * ENVS)
        for step in [*range(1, LENGTH + 1), 0, 1]:
            seen = env.step(np.zeros(ENVS, np.int64)).obs
            np.testing.assert_array_equal(seen, [expected[step]] * ENVS)


@pytest.mark.parametrize("kind", SPACES)
def test_encoding_a_batch_equals_encoding_each_observation(kind):
    from gymnasium.vector.utils import concatenate, create_empty_array

    space = SPACES[kind]
    observations = [sample(kind, env, 0) for env in range(3)]
    batch = concatenate(space, observations, create_empty_array(space, 3))
    encoder = observation_encoder(space)
    encoded = np.zeros((3, *encoder.shape), encoder.dtype)
    encoder.write(batch, encoded, (3,))
    np.testing.assert_array_equal(encoded, [frame(space, one) for one in observations])


@pytest.mark.parametrize("wrong", [1, 4])
@pytest.mark.parametrize("kind", SPACES)
def test_a_batch_of_another_size_is_rejected(kind, wrong):
    from gymnasium.vector.utils import concatenate, create_empty_array

    space = SPACES[kind]
    batch = concatenate(space, [sample(kind, 0, 0)] * wrong, create_empty_array(space, wrong))
    encoder = observation_encoder(space)
    with pytest.raises(ValueError, match="space says"):
        encoder.write(batch, np.zeros((3, *encoder.shape), encoder.dtype), (3,))


@pytest.mark.parametrize("kwargs", [{}, {"grayscale": False}])
def test_ale_observations_equal_those_of_ale_py(kwargs):
    ale = pytest.importorskip("ale_py.vector_env")
    from steadyrl.envs.backends.single_env import episode_seed

    config = settings("ALE/Pong-v5", backend="ale", kwargs=kwargs)
    raw = ale.AtariVectorEnv("pong", ENVS, stack_num=1, reward_clipping=False, **kwargs)
    seeds = [episode_seed(3, env, 0) % (2**31 - 1) for env in range(ENVS)]
    with build_env(config, seed=3, num_envs=ENVS) as env:
        pairs = [(env.reset().copy(), raw.reset(seed=np.array(seeds))[0])]
        for _ in range(5):
            action = np.full(ENVS, 2)
            pairs.append((env.step(action).obs.copy(), raw.step(action)[0]))
    for ours, theirs in pairs:
        expected = theirs[:, 0] if theirs.ndim == 4 else theirs[:, 0].transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(ours.reshape(expected.shape), expected)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Pong-v5"])
def test_envpool_observations_equal_those_of_envpool(env_id):
    envpool = pytest.importorskip("envpool")
    from steadyrl.envs.backends.single_env import episode_seed

    more = {"stack_num": 1} if env_id == "Pong-v5" else {}
    seed = episode_seed(3, 0, 0) % (2**31 - 1)
    raw = envpool.make(env_id, env_type="gymnasium", num_envs=ENVS, seed=seed, **more)
    config = settings(env_id, backend="envpool")
    with build_env(config, seed=3, num_envs=ENVS) as env:
        pairs = [(env.reset().copy(), raw.reset()[0])]
        for _ in range(5):
            action = np.zeros(ENVS, raw.action_space.dtype)
            pairs.append((env.step(action).obs.copy(), raw.step(action)[0]))
    for ours, theirs in pairs:
        space = raw.observation_space
        np.testing.assert_array_equal(ours, [frame(space, one) for one in theirs])


@pytest.mark.parametrize("backend", ["sync", "async", "batch"])
@pytest.mark.parametrize(
    ("kind", "warning"), [("depth", "rounded to 256"), ("no bounds", "no finite bounds")]
)
def test_warnings_of_the_encoder_are_logged_once(kind, warning, backend, caplog):
    config = settings("example_spaces:Show-v0", backend=backend, kwargs={"kind": kind})
    for each in (config, config.for_evaluation()):
        with build_env(each, seed=0, num_envs=ENVS) as env:
            env.reset()
            env.step(np.zeros(ENVS, np.int64))
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning in message
    assert message.startswith("example_spaces:Show-v0: ")
