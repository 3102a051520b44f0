"""Building environments from settings: backends, defaults and errors that say what to do."""

from __future__ import annotations

import importlib
import operator
import os
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from own_kernels import chosen
from toy_environments import Counter, CounterVector, settings

from steadyrl.core.errors import SettingError
from steadyrl.envs import factory
from steadyrl.envs import registration as making
from steadyrl.envs.factory import build_env, build_render_env, choose_backend, probe
from steadyrl.envs.kernels.api import KernelEntry
from steadyrl.envs.registration import PROVIDERS


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("CartPol-v1", "did you mean CartPole-v1"),
        ("CartPole-v7", "did you mean CartPole-v1"),
        ("cartpole-v1", "did you mean CartPole-v1"),
        ("Pendulum", "did you mean Pendulum-v1"),
        ("LunarLander-v2", "did you mean LunarLander-v3"),
        ("QQQQQQQQ-v0", "is the package that registers it installed.* module:QQQQQQQQ-v0$"),
        ("Tank-v0", "One that your module registers is written module:Tank-v0$"),
        ("CartPol-v1", "did you mean CartPole-v1.$"),
        ("nowhere.envs.Tank-v0", "write nowhere.envs:Tank-v0: the module, a colon, and the id"),
        ("toy_environments/Counter-v0", "write toy_environments:toy_environments/Counter-v0 to"),
        ("toy_environments:Conter-v0", "did you mean toy_environments:Counter-v0"),
        ("toy_environments.py:Counter-v0", "names a file, .* write toy_environments:Counter-v0$"),
        ("./a/toys.py:Counter-v0", "names a file, not a module: write a.toys:Counter-v0$"),
        ("no_such_module_here:Env-v0", "cannot import no_such_module_here"),
    ],
)
def test_an_unknown_id_is_rejected_with_the_nearest(env_id, hint):
    with pytest.raises(SettingError, match=hint) as caught:
        probe(settings(env_id))
    assert (caught.value.field, caught.value.value) == ("id", env_id)


def test_a_module_that_is_not_found_is_answered_with_the_search_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingError) as caught:
        probe(settings("no_such_module_here:Env-v0"))
    found = f"found in the current directory ({tmp_path}), PYTHONPATH and installed packages"
    assert found in caught.value.reason
    (tmp_path / "needs.py").write_text("import another_that_is_missing")
    with pytest.raises(
        SettingError, match=r"No module named 'another_that_is_missing' \("
    ) as caught:
        probe(settings("needs:Env-v0"))
    assert "PYTHONPATH" not in caught.value.reason


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


def test_unknown_keywords_are_rejected():
    with pytest.raises(SettingError, match="CartPole-v1 has no such keyword argument") as caught:
        probe(settings("CartPole-v1", kwargs={"sutton": True}))
    assert caught.value.field == "kwargs.sutton"


class Traded(Counter):
    """Needs data; with it, the class it builds upon lacks an argument: a bug."""

    def __init__(self, prices):
        dict.fromkeys() if prices else super().__init__()


@pytest.mark.parametrize("entry", [Traded, f"{__name__}:Traded"])
def test_keywords_that_an_environment_requires_are_named(entry, monkeypatch):
    monkeypatch.setitem(
        gym.registry, "Traded-v0", gym.envs.registration.EnvSpec("Traded-v0", entry)
    )
    with pytest.raises(SettingError, match="Traded-v0 needs 'prices'; values that") as caught:
        probe(settings("Traded-v0"))
    assert caught.value.field == "kwargs"
    with pytest.raises(SettingError, match="cannot be built: TypeError: fromkeys"):
        probe(settings("Traded-v0", kwargs={"prices": [1]}))
    assert probe(settings("Traded-v0", kwargs={"prices": []})).frame_shape == (3,)


class Framed(Counter):
    """Adds a tuple to the shape that it is given, as environments with images do."""

    def __init__(self, config):
        self.shape = operator.add((4,), config["shape"])
        super().__init__()


def test_lists_in_place_of_tuples_are_named(monkeypatch):
    framed = gym.envs.registration.EnvSpec("Framed-v0", Framed)
    monkeypatch.setitem(gym.registry, "Framed-v0", framed)
    hint = r"kwargs=.*may need tuples in place of lists \(can only concatenate tuple.*register\("
    with pytest.raises(SettingError, match=hint):
        probe(settings("Framed-v0", kwargs={"config": {"shape": [84, 84]}}))


def test_keywords_reach_the_environment():
    assert probe(settings("FrozenLake-v1", kwargs={"map_name": "8x8"})).frame_shape == (64,)


def test_a_failing_constructor_is_an_invalid_setting():
    with pytest.raises(SettingError, match="no more of me"):
        probe(settings(kwargs={"fail_at_build": 0}))


def test_batch_is_rejected_without_a_vector_environment():
    with pytest.raises(SettingError, match="no vector environment of its own"):
        probe(settings("Acrobot-v1", backend="batch"))


@pytest.mark.parametrize(
    ("env_id", "num_envs", "backend"),
    [
        ("CartPole-v1", 1, "kernel"),
        ("CartPole-v1", 8, "kernel"),
        ("Blackjack-v1", 1, "sync"),
        ("toy_environments:Counter-v0", 1, "sync"),
        ("toy_environments:Counter-v0", 8, "batch"),
    ],
)
def test_auto_chooses_a_backend_and_logs_it(env_id, num_envs, backend, caplog):
    caplog.set_level("INFO", "steadyrl")
    config = settings(env_id, backend="auto", num_envs=num_envs)
    probe(config)
    assert not caplog.text
    build_env(config, seed=0).close()
    assert f"training: backend {backend} for {num_envs} x {env_id}" in caplog.text


@pytest.mark.parametrize(("seconds", "backend"), [(1e-5, "sync"), (1e-3, "async")])
def test_auto_uses_async_for_slow_steps_only(seconds, backend, monkeypatch):
    monkeypatch.setattr(factory, "step_seconds", lambda _: seconds)
    monkeypatch.setattr(factory, "usable_cores", lambda: 2)
    chosen = choose_backend(settings("Blackjack-v1", backend="auto", num_envs=4))
    assert chosen == (backend, f"a step takes {seconds * 1e6:,.0f} µs")
    assert choose_backend(settings("Blackjack-v1", backend="auto"))[0] == "sync"


def test_step_seconds_excludes_resets():
    assert 0 < factory.step_seconds(settings("CartPole-v1")) < 0.1


def test_auto_uses_sync_when_measuring_steps_fails():
    config = settings(backend="auto", num_envs=2, kwargs={"fail_at_reset": 1})
    assert choose_backend(config)[0] == "sync"


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_envs", 0), ("frame_stack", 0), ("frame_stack", 1_001), ("step_timeout", 0.0),
     ("step_timeout", float("nan")), ("max_restarts", -1), ("id", ""), ("num_envs", 10**9),
     ("step_timeout", 1e300), ("max_restarts", 10**18), ("frame_stack", 10**6)],
)  # fmt: skip
def test_settings_out_of_range_are_rejected(field, value):
    with pytest.raises(SettingError) as caught:
        settings(**{"env_id" if field == "id" else field: value})
    assert caught.value.field == field


def test_probing_imports_neither_torch_nor_numba():
    code = (
        "import sys, steadyrl.envs.factory\n"
        "from steadyrl.envs.settings import EnvSettings as S\n"
        "steadyrl.envs.factory.probe(S(id='CartPole-v1', num_envs=1, backend='auto',\n"
        "  frame_stack=1,\n"
        "  kwargs={}, wrappers=(), action_masks='auto', image_axes='auto', image_range=None,\n"
        "  info_metrics=(), step_timeout=1.0, max_restarts=0))\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("kwargs", [{1: 2}, {"id": 3}, {"num_envs": 3}, {"a b": 1}])
def test_reserved_and_invalid_keywords_are_rejected(kwargs):
    (key,) = kwargs
    with pytest.raises(SettingError) as caught:
        probe(settings("CartPole-v1", kwargs=kwargs))
    assert caught.value.field == f"kwargs.{key}"


@pytest.mark.parametrize("given", [{1: 5}, [{"b": {True: 5}}], {"b": {None: 5}}, {"b": [{2.5: 5}]}])
@pytest.mark.parametrize("field", ["kwargs", "wrappers"])
def test_keys_that_a_checkpoint_cannot_keep_are_rejected(field, given):
    arguments = {"a": given}
    written = arguments if field == "kwargs" else ({"TimeLimit": arguments},)
    with pytest.raises(SettingError, match="keep only texts as keys") as caught:
        settings("CartPole-v1", **{field: written})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "env_id", [":b", ":", "::", "..:X", ".x:X", "a b:X", "CartPole-v1:", "a..b:X"]
)
def test_invalid_module_names_in_ids_are_rejected(env_id):
    with pytest.raises(SettingError, match="must be module:"):
        probe(settings(env_id))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\ny = x / 0\n", r"ZeroDivisionError: division by zero \(.*broken.py, line 2\)"),
        ("\ndef f(:\n", r"SyntaxError: [^(]* \(/[^(]*broken.py, line 2\)$"),
        ("import no_such_module_here", "No module named 'no_such_module_here' .*broken.py, line 1"),
        ("import sys\nsys.exit(0)", "SystemExit: 0 .*broken.py, line 2"),
        ("\nimport also_broken", r"ValueError: oh \(.*also_broken.py, line 2\)"),
    ],
)
def test_errors_in_a_users_module_show_file_and_line(tmp_path, monkeypatch, text, reason):
    (tmp_path / "broken.py").write_text(text)
    (tmp_path / "also_broken.py").write_text("\nraise ValueError('oh')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(SettingError, match=reason) as caught:
        probe(settings("broken:X-v0"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("metadata", [{"autoreset_mode": AutoresetMode.SAME_STEP}, {}])
def test_vector_environments_that_may_not_reset_on_the_next_step_are_not_used(metadata):
    kind = type("Unknown", (CounterVector,), {"metadata": metadata})
    gym.register("Unknown-v0", Counter, vector_entry_point=kind)
    assert choose_backend(settings("Unknown-v0", backend="auto", num_envs=8))[0] != "batch"
    with pytest.raises(SettingError, match=r"does not reset on the step after.*NEXT_STEP"):
        probe(settings("Unknown-v0", backend="batch", num_envs=8))


@pytest.mark.parametrize("limit", [-1, None, 7])
def test_vector_environments_have_the_time_limit_of_single_ones(limit):
    """A controller balances the pole, so that only the time limit ends episodes."""
    config = settings(
        "CartPole-v1", backend="batch", num_envs=2, kwargs={"max_episode_steps": limit}
    )
    lengths = []
    with build_env(config, seed=0) as env:
        obs = env.reset()
        for _ in range(600):
            leaning = obs @ np.array([0.05, 0.2, 1.0, 1.0])
            step = env.step((leaning > 0).astype(np.int64))
            obs = step.obs
            lengths += [episode.length for episode in step.episodes]
    expected = {-1: set(), None: {500}, 7: {7}}
    assert set(lengths) == expected[limit]


def test_invalid_time_limits_are_rejected():
    with pytest.raises(SettingError, match=r"kwargs\.max_episode_steps=0: must be a positive"):
        probe(settings("CartPole-v1", backend="batch", kwargs={"max_episode_steps": 0}))


ONLY_BATCH = "toy_environments:OnlyBatch-v0"


def test_batch_needs_a_vector_entry_point_only():
    assert probe(settings(ONLY_BATCH, backend="batch")).frame_shape == (3,)
    with pytest.raises(SettingError, match="has no such keyword argument"):
        probe(settings("CartPole-v1", backend="batch", kwargs={"nope": 1}))


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_auto_uses_batch_for_environments_without_single_ones(num_envs):
    config = settings(ONLY_BATCH, backend="auto", num_envs=num_envs)
    assert choose_backend(config)[0] == "batch"
    assert probe(config).num_envs == num_envs
    with build_env(config, seed=0) as env:
        env.reset()
        assert env.step(np.zeros(num_envs, np.int64)).valid.all()


def test_environments_without_single_ones_reject_what_needs_them():
    for backend in ("sync", "async"):
        with pytest.raises(SettingError, match=r"OnlyBatch-v0: .* needs env\.backend=batch"):
            probe(settings(ONLY_BATCH, backend=backend))
    with pytest.raises(SettingError, match=r"backend batch steps all .* cannot be wrapped"):
        probe(settings(ONLY_BATCH, backend="auto", wrappers=({"ClipReward": {"max_reward": 1}},)))
    config = settings(ONLY_BATCH, backend="auto")
    rendered = config.for_rendering(video=None, episodes=1, max_episode_steps=9)
    with (
        pytest.raises(SettingError, match="without wrappers, masks or videos"),
        build_render_env(rendered, seed=0) as env,
    ):
        env.reset()


def test_registered_minatar_ids_equal_minatars_own():
    pytest.importorskip("minatar")
    making.register_provider("minatar")
    ours = {name: spec for name, spec in gym.registry.items() if name.startswith("MinAtar/")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that ids exist already
        importlib.import_module("minatar.gym").register_envs()
    assert len(ours) == 10
    for name, spec in ours.items():
        assert gym.registry[name] == spec


def test_minatar_kernels_do_not_import_minatar():
    pytest.importorskip("minatar")
    code = """
import sys
from toy_environments import settings
from steadyrl.envs.factory import build_env, probe
config = settings("MinAtar/Breakout-v1", backend="auto")
probe(config)
with build_env(config, seed=0) as env:
    env.reset()
sys.exit("minatar" in sys.modules or "seaborn" in sys.modules)
"""
    root = Path(__file__).parents[2]
    folders = os.pathsep.join((str(root / "tests" / "helpers"), str(root)))
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": folders})


@pytest.mark.parametrize("game", making.MINATAR_GAMES)
def test_specs_of_minatar_kernels_equal_the_games(game):
    pytest.importorskip("minatar")
    found = [probe(settings(f"MinAtar/{game}-v1", backend=name)) for name in ("kernel", "sync")]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "kwargs", "reason"),
    [
        ("Wrapped", {}, "additional_wrappers"),
        ("Picky", {"length": 3}, "has no such keyword argument"),
        ("Picky", {"harm": "key"}, "KeyError: 'a level'"),
        ("Picky", {"harm": "exit"}, "SystemExit: 3"),
    ],
)
def test_auto_falls_back_to_sync_when_batch_cannot_be_built(monkeypatch, name, kwargs, reason):
    monkeypatch.setattr(factory, "usable_cores", lambda: 1)
    config = settings(f"toy_environments:{name}-v0", kwargs=kwargs, backend="auto", num_envs=10)
    chosen, why = choose_backend(config)
    assert chosen == "sync"
    assert "backend batch cannot run them" in why and reason in why
    with build_env(config, seed=0) as env:
        env.reset()
        assert env.step(np.zeros(10, np.int64)).valid.all()


class Draining(Counter):
    """Takes bonuses from the list that it was given, and so may a wrapper; each has its own."""

    def __init__(self, bonuses, **_):
        super().__init__()
        self.bonuses = bonuses

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return observation + self.bonuses["left"].pop(), info


class DrainingWrapper(gym.Wrapper):
    def __init__(self, env, bonuses):
        super().__init__(env)
        self.bonuses = bonuses

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        return observation + self.bonuses["left"].pop(), info


class DrainingVector(CounterVector):
    def __init__(self, num_envs, bonuses):
        super().__init__(num_envs)
        self.bonuses = bonuses

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return observation + self.bonuses["left"].pop(), info


gym.register("Draining-v0", Draining, vector_entry_point=DrainingVector)


@pytest.mark.parametrize("backend", ["sync", "async", "batch"])
def test_an_environment_that_changes_its_arguments_changes_no_others(backend):
    bonuses = {"left": [100, 1, 2, 4]}
    config = settings("Draining-v0", backend=backend, num_envs=2, kwargs={"bonuses": bonuses})
    for _ in range(2):  # another is built from the same settings, as for evaluation
        with build_env(config, seed=0) as env:
            assert env.reset()[:, 0].tolist() == [4, 4]
    assert bonuses == {"left": [100, 1, 2, 4]}


def test_a_wrapper_that_changes_its_arguments_changes_no_others():
    bonuses = {"left": [100, 1, 2, 4]}
    wrappers = ({f"{__name__}:DrainingWrapper": {"bonuses": bonuses}},)
    with build_env(settings(num_envs=3, wrappers=wrappers), seed=0) as env:
        assert env.reset()[:, 0].tolist() == [4, 4, 4]
    assert bonuses == {"left": [100, 1, 2, 4]}


def test_a_kernel_that_changes_its_arguments_changes_no_others():
    taken = []

    def make(bonuses):
        taken.append(bonuses["left"].pop())
        return chosen()

    given = {"bonuses": {"left": [100, 1, 2, 4]}}
    gym.register("DrainingKernel-v0", entry_point=KernelEntry(make), kwargs=given)
    for _ in range(2):
        build_env(settings("DrainingKernel-v0", backend="kernel"), seed=0).close()
    assert taken == [4, 4]
