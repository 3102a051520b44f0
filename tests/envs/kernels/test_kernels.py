"""Environment kernels equal the environments they replace, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from numba import njit
from own_kernels import COUNTED
from toy_environments import settings

from steadyrl.core.errors import SettingError
from steadyrl.core.jit import jit
from steadyrl.envs.backends.kernel import KernelBackend
from steadyrl.envs.factory import build_env, choose_backend, probe
from steadyrl.envs.kernels import sources as kernel_sources
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.kernels.state import Outcome
from steadyrl.envs.types import BoxActions, EnvironmentFailedError

ENVS = 3
FALLING = (
    "CartPole",
    "CartPole, other rewards",
    "CartPole, endless",
)  # episodes end long before the time limit
UNENDING = (  # episodes end by the time limit only
    "Pendulum",
    "Pendulum, light",
    "Freeway",
    "discrete from 5",
    "matrix actions",
    "scalar actions",
)
CASES = {
    "CartPole": ("CartPole-v1", {}),
    "CartPole, other rewards": ("CartPole-v1", {"sutton_barto_reward": True}),
    "CartPole, short": ("CartPole-v0", {"max_episode_steps": 12}),
    "CartPole, endless": ("CartPole-v1", {"max_episode_steps": -1}),
    "Acrobot": ("Acrobot-v1", {}),
    "MountainCar": ("MountainCar-v0", {"max_episode_steps": 90}),
    "MountainCar, fast": ("MountainCar-v0", {"goal_velocity": 0.01}),
    "MountainCarContinuous": ("MountainCarContinuous-v0", {"max_episode_steps": 500}),
    "MountainCarContinuous, fast": (
        "MountainCarContinuous-v0",
        {"goal_velocity": 0.02, "max_episode_steps": 500},
    ),
    "Pendulum": ("Pendulum-v1", {}),
    "Pendulum, light": ("Pendulum-v1", {"g": 9.81}),
    "FrozenLake": ("FrozenLake-v1", {}),
    "FrozenLake, own": (
        "FrozenLake-v1",
        {
            "desc": ["SFFF", "SHFG", "FFHF"],
            "success_rate": 0.75,
            "reward_schedule": [3, -1.5, 0.25],
        },
    ),
    "FrozenLake, large": ("FrozenLake8x8-v1", {"is_slippery": False}),
    "CliffWalking": ("CliffWalking-v1", {"max_episode_steps": 300}),
    "CliffWalking, slippery": ("CliffWalkingSlippery-v1", {"max_episode_steps": 300}),
    "Taxi": ("Taxi-v4", {}),
    "Taxi, rainy": ("Taxi-v4", {"is_rainy": True, "rainy_probability": 0.6}),
    "Asterix": ("MinAtar/Asterix-v0", {}),
    "Breakout": ("MinAtar/Breakout-v1", {"use_minimal_action_set": False}),
    "Freeway": ("MinAtar/Freeway-v1", {"max_episode_steps": 600}),
    "Seaquest": ("MinAtar/Seaquest-v1", {"sticky_action_prob": 0.3}),
    "SpaceInvaders": ("MinAtar/SpaceInvaders-v1", {}),
    "SpaceInvaders, even": ("MinAtar/SpaceInvaders-v0", {"difficulty_ramping": False}),
    "a user's kernel": (COUNTED, {"length": 0}),
    "discrete from 5": ("own_kernels:Chosen-v0", {"first": 5}),
    "matrix actions": ("own_kernels:Reached-v0", {}),
    "scalar actions": ("own_kernels:Reached-v0", {"shape": ()}),
}


def config(case, backend, **changes):
    env_id, kwargs = CASES[case]
    if env_id.startswith("MinAtar/"):
        pytest.importorskip("minatar")
    return settings(env_id, backend=backend, kwargs=kwargs, **{"num_envs": ENVS, **changes})


class Player:
    """Draw actions [N, …], some out of bounds; periodically they mostly repeat the previous one.

    A car that is pushed one way for long reaches the top of the mountain.
    """

    def __init__(self, spec):
        self._spec, self._rng, self._row, self._action = spec, np.random.default_rng(0), 0, None

    def __call__(self):
        drawn, self._row = self._draw(), self._row + 1
        if self._action is None:
            self._action = drawn
        keep = 0.97 if self._row // 250 % 2 else 0.0
        fresh = self._rng.random(self._spec.num_envs) >= keep
        self._action = self._action.copy()
        self._action[fresh] = drawn[fresh]
        return self._action

    def _draw(self):
        spec = self._spec
        if isinstance(spec.action, BoxActions):
            shape = (spec.num_envs, len(spec.action.low))
            return (self._rng.uniform(-1.5, 1.5, shape) * spec.action.high).astype(np.float32)
        return self._rng.integers(0, spec.action.n, spec.num_envs)


def lockstep(case, timesteps):
    """Step a kernel and its environment together; return how many episodes ended which way."""
    with (
        build_env(config(case, "kernel"), seed=5) as ours,
        build_env(config(case, "sync"), seed=5) as theirs,
    ):
        assert ours.spec == theirs.spec == probe(config(case, "kernel"))
        np.testing.assert_array_equal(ours.reset(), theirs.reset())
        player, terminated, truncated = Player(ours.spec), 0, 0
        for t in range(timesteps):
            action = player()
            step, expected = ours.step(action), theirs.step(action)
            for array, other in zip(step[:5], expected[:5], strict=True):
                assert array.tobytes() == other.tobytes(), (t, array, other)
            assert step.episodes == expected.episodes
            terminated += int(step.terminated.sum())
            truncated += int(step.truncated.sum())
    return terminated, truncated


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_equals_its_environment(case):
    assert sum(lockstep(case, timesteps=700)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_equals_its_environment_for_100_000_steps(case):
    terminated, truncated = lockstep(case, timesteps=-(-100_000 // ENVS))
    assert (terminated > 0) is (case not in UNENDING)
    env_id, kwargs = CASES[case]
    limited = gym.spec(env_id.rpartition(":")[2]).max_episode_steps or kwargs.get(
        "max_episode_steps"
    )
    assert truncated > 0 or not limited or case in FALLING


@njit
def run_steps(step, sim, action, outcome):
    """Run one timestep per action [T, N] in one compiled call."""
    for t in range(len(action)):
        flags = outcome.terminated[t], outcome.truncated[t], outcome.valid[t]
        step(
            sim, action[t], Outcome(outcome.obs[t], outcome.reward[t], flags[0], flags[1], flags[2])
        )


def test_a_kernel_runs_inside_compiled_code():
    """Timesteps of one compiled call equal the backend's, step by step."""
    timesteps = 50
    with (
        build_env(config("CartPole", "kernel"), seed=3) as env,
        contextlib.closing(KernelBackend(config("CartPole", "kernel"), seed=3)) as backend,
    ):
        action = np.random.default_rng(0).integers(0, 2, (timesteps, ENVS))
        expected = [env.reset().copy()]
        outcome = Outcome(
            np.zeros((timesteps + 1, ENVS, 4), np.float32),
            np.zeros((timesteps + 1, ENVS), np.float32),
            *(np.zeros((timesteps + 1, ENVS), np.bool_) for _ in range(3)),
        )
        run_steps(backend.kernel.step, backend.sim, np.concatenate([action[:1], action]), outcome)
        expected += [env.step(each).obs.copy() for each in action]
    np.testing.assert_array_equal(outcome.obs, expected)


@pytest.mark.parametrize(
    ("env_id", "changes", "reason"),
    [
        ("Blackjack-v1", {}, "backend=kernel: Blackjack-v1 has no kernel; use auto"),
        ("checked_simulators:SimulatorDrift-v0", {}, "SimulatorDrift-v0 has no kernel; use auto"),
        (
            "CartPole-v1",
            {"kwargs": {"render_mode": "rgb_array"}},
            "kwargs.render_mode=rgb_array: the",
        ),
        ("CartPole-v1", {"kwargs": {"max_episode_steps": 1.5}}, "must be a positive integer"),
        ("CartPole-v1", {"kwargs": {"max_episode_steps": -2}}, "must be a positive integer"),
        ("CartPole-v1", {"kwargs": {"max_episode_steps": 0}}, "must be a positive integer"),
        (COUNTED, {"kwargs": {"height": 3}}, "kwargs.height=3: the kernel of own_kernels"),
        ("CartPole-v1", {"info_metrics": ("x",)}, r"info_metrics=\[x\]: kernels have no info"),
    ],
)
def test_unsupported_kernel_settings_are_rejected(env_id, changes, reason):
    chosen = settings(env_id, backend="kernel", **changes)
    for build in (probe, lambda config: build_env(config, seed=0)):
        with pytest.raises(SettingError, match=reason) as refused:
            build(chosen)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("env_id", ["Blackjack-v1", "checked_simulators:SimulatorDrift-v0"])
def test_the_backend_to_use_without_a_kernel_exists(env_id):
    with pytest.raises(SettingError) as refused:
        probe(settings(env_id, backend="kernel"))
    (instead,) = re.findall(r"use (?:env\.backend=)?(\w+)", refused.value.reason)
    assert probe(settings(env_id, backend=instead)).id == env_id


def test_auto_uses_another_backend_for_unsupported_settings():
    other = settings("CartPole-v1", backend="auto", kwargs={"render_mode": "rgb_array"})
    assert choose_backend(other)[0] == "sync"
    fickle = settings("Taxi-v4", backend="auto", kwargs={"fickle_passenger": True})
    assert choose_backend(fickle)[0] == "sync"
    drawn = settings("FrozenLake-v1", backend="auto", kwargs={"map_name": None})
    assert choose_backend(drawn)[0] == "sync"
    assert choose_backend(settings("CartPole-v1", backend="auto", info_metrics=("x",)))[0] == "sync"


def test_a_reregistered_id_uses_the_registered_environment(monkeypatch):
    spec = copy.copy(gym.spec("CartPole-v1"))
    spec.entry_point = "gymnasium.envs.classic_control.acrobot:AcrobotEnv"
    monkeypatch.setitem(gym.registry, "CartPole-v1", spec)
    with build_env(settings("CartPole-v1", backend="kernel"), seed=0) as env:
        assert env.spec.frame_shape == (6,)
    spec.entry_point = "elsewhere:CartPoleEnv"
    assert choose_backend(settings("CartPole-v1", backend="auto"))[0] == "sync"


@pytest.mark.parametrize(
    ("env_id", "module"),
    [
        ("CartPole-v1", "gymnasium.envs.classic_control.cartpole"),
        ("FrozenLake-v1", "gymnasium.envs.toy_text.utils"),
        ("MinAtar/Breakout-v1", "minatar.environments.breakout"),
    ],
)
def test_a_kernel_is_not_used_when_its_environments_source_changed(
    env_id, module, tmp_path, monkeypatch
):
    """As after an upgrade or a local change of the installed package."""
    if module.startswith("minatar"):
        pytest.importorskip("minatar")
    assert choose_backend(settings(env_id, backend="auto"))[0] == "kernel"
    changed, source_of = tmp_path / "changed.py", kernel_sources.source_of
    changed.write_text(source_of(module).read_text() + "\n# of another release\n")
    monkeypatch.setattr(
        kernel_sources, "source_of", lambda name: changed if name == module else source_of(name)
    )
    name, why = choose_backend(settings(env_id, backend="auto"))
    assert name == "sync"
    assert why.endswith(f"reproduces another version than the installed {module}")
    assert "\n" not in why
    with pytest.raises(SettingError, match=f"installed {module}; use env.backend=sync"):
        choose_backend(settings(env_id, backend="kernel"))


@pytest.mark.parametrize("action", [-1, 2])
def test_an_action_out_of_range_stops_the_run(action):
    with build_env(config("CartPole", "kernel"), seed=0) as env:
        env.reset()
        with pytest.raises(EnvironmentFailedError, match="lie outside 0…1"):
            env.step(np.array([0, action, 0]))


@pytest.mark.parametrize(
    ("before", "after"), [("sync", "kernel"), ("batch", "kernel"), ("kernel", "sync")]
)
def test_a_state_of_another_backend_starts_new_episodes(before, after, caplog):
    """So a run survives another choice of `auto`."""
    zeros = np.zeros(ENVS, np.int64)
    with (
        build_env(config("CartPole", before), seed=0) as one,
        build_env(config("CartPole", after), seed=1) as other,
    ):
        one.reset()
        one.step(zeros)
        other.load_state_dict(one.state_dict())
        assert "cannot be continued" in caplog.text
        assert not other.step(zeros).valid.any()
        assert other.step(zeros).valid.all()


def test_functions_without_a_file_are_compiled_uncached():
    assert jit(eval("lambda number: number + 1"))(2) == 3  # a function without a source file


def test_a_users_kernel_is_also_a_gymnasium_environment():
    env = gym.make(COUNTED, length=2)
    first, _ = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    np.testing.assert_array_equal(first, again)
    assert env.observation_space.contains(first)
    assert [env.step(1)[1:4] for _ in range(2)] == [(1.0, False, False), (2.0, True, False)]
    assert (env.reset()[0] != first).any()  # without a seed the generator continues


def test_the_documented_example_is_a_kernel(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(example.splitlines()) <= 40
    (tmp_path / "my_module.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(CASES, "docs", ("my_module:Corridor-v0", {"length": 4}))
    terminated, truncated = lockstep("docs", timesteps=700)
    del sys.modules["my_module"]  # another page has a module of this name
    assert terminated > truncated > 0


@pytest.mark.parametrize(
    "action",
    [
        gym.spaces.MultiDiscrete([2, 3]),
        gym.spaces.MultiBinary(2),
        gym.spaces.Box(0, 5, (1,), np.int32),
    ],
)
def test_kernels_have_discrete_actions_or_floats(action):
    with pytest.raises(ValueError, match="must be Discrete or a float Box: "):
        Kernel(lambda *_: None, (3,), action)
