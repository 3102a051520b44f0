"""The plain loop gives what Gymnasium's own gives, breaks as said, and always closes."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_environments import Counter, settings

from envs.factory import build_env
from envs.seeding import episode_seed
from envs.types import EnvironmentFailedError
from memory.errors import NonFiniteError


class Reseeded(gym.Wrapper):
    """Seed every episode as ours do."""

    def __init__(self, env, index):
        super().__init__(env)
        self._index, self._episode = index, -1

    def reset(self, *, seed=None, options=None):
        self._episode += 1
        return self.env.reset(seed=episode_seed(5, self._index, self._episode))


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0"])
def test_rows_are_those_of_gymnasium(env_id, num_envs):
    theirs = SyncVectorEnv(
        [lambda i=i: Reseeded(gym.make(env_id), i) for i in range(num_envs)],
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )
    rng = np.random.default_rng(0)
    with build_env(settings(env_id, num_envs=num_envs), seed=5) as ours:
        np.testing.assert_array_equal(ours.reset(), theirs.reset()[0])
        over = np.zeros(num_envs, bool)
        for _ in range(450):
            if env_id == "Pendulum-v1":
                action = rng.uniform(-2, 2, (num_envs, 1)).astype(np.float32)
            else:
                action = rng.integers(0, 2, num_envs)
            step = ours.step(action)
            obs, reward, terminated, truncated, _ = theirs.step(action)
            np.testing.assert_array_equal(step.obs, obs)
            np.testing.assert_array_equal(step.reward, reward.astype(np.float32))
            np.testing.assert_array_equal(step.terminated, terminated)
            np.testing.assert_array_equal(step.truncated, truncated)
            np.testing.assert_array_equal(step.valid, ~over)
            over = terminated | truncated
    theirs.close()


def faulty(tmp_path, fault, **changes):
    kwargs = {"fault": fault, "fuse": str(tmp_path / "fuse"), **changes.pop("kwargs", {})}
    return settings("toy_environments:Faulty-v0", kwargs=kwargs, **changes)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (
            "step:raise",
            EnvironmentFailedError,
            "environment 0 .*step 2.*TwoArgumentsError: this",
        ),
        ("step:wrong_shape", EnvironmentFailedError, r"shape \(5,\), its space says \(2,\)"),
        ("step:wrong_type", EnvironmentFailedError, "could not convert string"),
        ("step:nan_reward", NonFiniteError, "reward of environment 0 is not finite at step 2"),
        ("step:inf_observation", NonFiniteError, "observation of environment 0 .* step 2"),
        ("reset:raise", EnvironmentFailedError, "environment 0 failed at step 0"),
        ("constructor:raise", EnvironmentFailedError, "environment 0 failed at step 0"),
    ],
)
def test_without_restarts_a_fault_stops_naming_where(tmp_path, fault, error, message):
    with pytest.raises(error, match=message), build_env(faulty(tmp_path, fault), seed=0) as env:
        env.reset()
        for _ in range(5):
            env.step(np.zeros(1, np.int64))


@pytest.mark.parametrize(
    "fault",
    [
        "step:raise",
        "step:wrong_shape",
        "step:wrong_type",
        "step:nan_reward",
        "step:inf_observation",
    ],
)
def test_with_restarts_a_fault_is_a_cut(tmp_path, fault, caplog):
    config = faulty(tmp_path, fault, num_envs=2, max_restarts=1)
    with build_env(config, seed=0) as env:
        env.reset()
        rows = [env.step(np.zeros(2, np.int64)) for _ in range(2)]
        cut = env.step(np.zeros(2, np.int64))  # one of the two breaks in its third step
        assert cut.valid.tolist() == [False, True]
        assert cut.obs.tolist() == [[0, 1], [3, 1]]
        assert cut.reward.tolist() == [0, 1]
        assert not (cut.terminated | cut.truncated).any()
        after = [env.step(np.zeros(2, np.int64)) for _ in range(10)]
    assert all(row.valid.all() for row in rows)
    lengths = {e.env: e.length for row in after for e in row.episodes}
    assert lengths == {0: 10, 1: 10}
    assert "environment 0" in caplog.text
    assert fault.endswith(("nan_reward", "inf_observation")) or "Traceback" in caplog.text


@pytest.mark.parametrize("fault", ["constructor:raise", "reset:raise"])
def test_with_restarts_a_failing_start_is_tried_again(tmp_path, fault):
    config = faulty(tmp_path, fault, max_restarts=2, kwargs={"times": 2})
    with build_env(config, seed=0) as env:
        env.reset()
        assert env.step(np.zeros(1, np.int64)).valid.all()


def test_restarts_run_out(tmp_path):
    config = faulty(tmp_path, "step:raise", max_restarts=2, kwargs={"times": 100})
    with build_env(config, seed=0) as env:
        env.reset()
        for _ in range(8):  # breaks in every third step of an episode
            env.step(np.zeros(1, np.int64))
        with pytest.raises(EnvironmentFailedError):
            env.step(np.zeros(1, np.int64))


@pytest.fixture
def balance():
    Counter.opened = Counter.closed = 0
    yield
    assert Counter.opened == Counter.closed > 0


@pytest.mark.usefixtures("balance")
def test_closes_what_was_opened():
    with build_env(settings(num_envs=3), seed=0) as env:
        env.reset()
    env.close()


@pytest.mark.usefixtures("balance")
def test_closes_the_others_when_one_cannot_be_built():
    with pytest.raises(EnvironmentFailedError, match=r"environment 2 .*no more of me"):
        build_env(settings(num_envs=3, kwargs={"fail_at_build": 2}), seed=0)


@pytest.mark.usefixtures("balance")
def test_closes_all_when_a_reset_fails():
    config = settings(num_envs=3, kwargs={"fail_at_reset": 1})
    with (
        pytest.raises(EnvironmentFailedError, match="cannot reset"),
        build_env(config, seed=0) as env,
    ):
        env.reset()
