"""Settings become environments, or a refusal that says what to do; always fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from toy_environments import settings

from envs import choosing
from envs.choosing import choose_backend
from envs.factory import build_env, probe
from envs.making import PROVIDERS
from memory.errors import SettingError


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("CartPol-v1", "did you mean CartPole-v1"),
        ("CartPole-v7", "did you mean CartPole-v1"),
        ("cartpole-v1", "did you mean CartPole-v1"),
        ("Pendulum", "did you mean Pendulum-v1"),
        ("LunarLander-v2", "did you mean LunarLander-v3"),
        ("QQQQQQQQ-v0", "is the package that brings it installed"),
        ("no_such_module_here:Env-v0", "cannot import no_such_module_here"),
    ],
)
def test_an_unknown_environment_is_refused_with_the_nearest(env_id, hint):
    with pytest.raises(SettingError, match=hint) as caught:
        probe(settings(env_id))
    assert (caught.value.field, caught.value.value) == ("id", env_id)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(PROVIDERS, "Toy/", ("no_such_module_here", "toys"))
    with pytest.raises(SettingError, match=r'pip install -e "\.\[toys\]"'):
        probe(settings("Toy/Thing-v0"))


@pytest.mark.parametrize(("env_id", "extra"), [("LunarLander-v3", "box2d"), ("Ant-v5", "mujoco")])
def test_a_missing_engine_names_its_extra(monkeypatch, env_id, extra):
    engines = ("Box2D", "mujoco", "gymnasium.envs.box2d", "gymnasium.envs.mujoco")
    for name in [*engines, *(name for name in sys.modules if name.startswith(engines))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingError, match=rf'pip install -e "\.\[{extra}\]"'):
        probe(settings(env_id))


def test_an_unknown_keyword_is_refused():
    with pytest.raises(SettingError, match="CartPole-v1 takes no such keyword") as caught:
        probe(settings("CartPole-v1", kwargs={"sutton": True}))
    assert caught.value.field == "kwargs.sutton"


def test_keywords_reach_the_environment():
    assert probe(settings("FrozenLake-v1", kwargs={"map_name": "8x8"})).frame_shape == (64,)


def test_a_constructor_that_fails_is_a_refusal():
    with pytest.raises(SettingError, match="no more of me"):
        probe(settings(kwargs={"fail_at_build": 0}))


def test_native_where_there_is_none_is_refused():
    with pytest.raises(SettingError, match="no vector environment of its own"):
        build_env(settings("Acrobot-v1", backend="native"), seed=0)


@pytest.mark.parametrize(
    ("env_id", "num_envs", "backend"),
    [
        ("CartPole-v1", 1, "sync"),
        ("CartPole-v1", 8, "native"),
        ("Acrobot-v1", 1, "sync"),
    ],
)
def test_auto_chooses_by_rule_and_says_so(env_id, num_envs, backend, caplog):
    caplog.set_level("INFO", "steadyrl")
    config = settings(env_id, backend="auto", num_envs=num_envs)
    probe(config)
    assert not caplog.text
    build_env(config, seed=0).close()
    assert f"backend {backend} for {num_envs} x {env_id}" in caplog.text


@pytest.mark.parametrize(("seconds", "backend"), [(1e-5, "sync"), (1e-3, "async")])
def test_auto_uses_processes_only_for_steps_dearer_than_a_round_trip(seconds, backend, monkeypatch):
    monkeypatch.setattr(choosing, "step_seconds", lambda _: seconds)
    monkeypatch.setattr(choosing, "usable_cores", lambda: 2)
    chosen = choose_backend(settings("Acrobot-v1", backend="auto"), 4)
    assert chosen == (backend, f"a step takes {seconds * 1e6:,.0f} µs")
    assert choose_backend(settings("Acrobot-v1", backend="auto"), 1).backend == "sync"


def test_the_trial_measures_steps_not_resets():
    assert 0 < choosing.step_seconds(settings("CartPole-v1")) < 0.1


def test_a_trial_that_fails_leaves_the_fault_to_the_backend():
    config = settings(backend="auto", num_envs=2, kwargs={"fail_at_reset": 1})
    assert choose_backend(config, 2).backend == "sync"


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_envs", 0), ("frame_stack", 0), ("step_timeout", 0.0), ("step_timeout", float("nan")),
     ("max_restarts", -1), ("id", "")],
)  # fmt: skip
def test_settings_are_checked(field, value):
    with pytest.raises(SettingError) as caught:
        settings(**{"env_id" if field == "id" else field: value})
    assert caught.value.field == field


def test_a_refusal_does_not_wait_for_torch():
    code = (
        "import sys, envs.factory\n"
        "from envs.settings import EnvSettings as S\n"
        "envs.factory.probe(S(id='CartPole-v1', num_envs=1, backend='auto', frame_stack=1,\n"
        "  kwargs={}, step_timeout=1.0, max_restarts=0))\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
