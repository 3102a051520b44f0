"""Checks of an environment's first steps: warnings or errors that name it, on every backend."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from opened import job
from toy_environments import Counter, settings

from steadyrl.envs import vector
from steadyrl.envs.backends.single_env import (
    FIRST_STEPS,
    MAX_WARNINGS,
    WarnOnce,
    check_first_steps,
)
from steadyrl.envs.factory import build_env
from steadyrl.envs.registration import make_env
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.training.setup import open_run
from tests.envs.backends.test_contract import CONFIGS, preset, sample_action

BACKENDS = ["sync", "async"]


def odd(what, backend="sync", env_id="odd_envs:Odd-v0", **changes):
    kwargs = {"odd": what, **changes.pop("kwargs", {})}
    return settings(env_id, backend=backend, kwargs=kwargs, **changes)


def play(config, steps=20):
    with build_env(config, seed=0) as env:
        env.reset()
        for _ in range(steps):
            env.step(np.zeros(config.num_envs, np.int64))


ERRORS = {
    "reset: no info": r"environment 0 .*reset\(\) returned a ndarray, not \(observation, info\)",
    "reset: three values": r"reset\(\) returned 3 values",
    "reset: info is a list": "`env.reset\\(\\)` was not a dictionary.*list",
    "step: four values": r"step 0: step\(\) returned 4 values, not \(observation, reward, ",
    "step: a list": r"step\(\) returned a list",
    "step: info is none": "`info` returned by `step\\(\\)` must be a python dictionary.*None",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("env_id", ["odd_envs:Odd-v0", "odd_envs:OddBare-v0"])
@pytest.mark.parametrize("what", ERRORS)
def test_broken_return_values_end_the_run_at_once(what, env_id, backend, caplog):
    with pytest.raises(EnvironmentFailedError, match=ERRORS[what]) as caught:
        play(odd(what, backend, env_id, max_restarts=5, num_envs=2))
    assert "\n" not in str(caught.value)
    assert "rebuilding it" not in caplog.text


def test_metadata_that_are_none_do_no_harm():
    """As those of an environment of old Gym that is wrapped for Gymnasium."""
    play(odd("no metadata"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["seed: overflow", "seed: type"])
def test_environments_that_take_signed_seeds_only_get_the_lower_31_bits(what, backend, caplog):
    play(odd(what, backend, kwargs={"length": 1}), steps=40)
    assert "rebuilding it" not in caplog.text


WARNINGS = {
    "reset: outside": "`reset()` method is not within the observation space",
    "step: outside": "`step()` method is not within the observation space",
    "step: doubles": "numpy array dtype to be float32, actual type: float64",
    "step: whole flag": "`terminated` signal to be a boolean, actual type: <class 'int'>",
    "reward: truth": "must be a float, int",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", WARNINGS)
def test_minor_violations_are_warned_of_once(what, backend, caplog):
    play(odd(what, backend, num_envs=3))
    messages = [record.getMessage() for record in caplog.records]
    assert WARNINGS[what] in messages[0]
    assert len(set(messages)) == len(messages) <= 2  # float64 values are outside the space, too
    for line in messages:
        assert line.startswith(("odd_envs:Odd-v0: The ", "odd_envs:Odd-v0: Expects"))
        assert line.isprintable()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("reward: text", "its reward is '3', a str, not a number"),
        (
            "reward: array",
            r"its reward is array\(\[1., 1.\]\), a ndarray, not a number: add them up in",
        ),
        ("reward: one element", r"a ndarray, not a number: return reward.item\(\)"),
        (
            "reward: one tensor",
            r"its reward is tensor\(\[1.\]\), a Tensor, not a number: return reward.item\(\)",
        ),
        ("reward: none", "its reward is None, a NoneType, not a number"),
        ("reward: none, late", "step 12: TypeError: its reward is None"),
        ("step: text", r"ValueError: observation has shape \(\), its space says \(4,\)"),
        ("step: other shape, late", r"step 12: ValueError: observation has shape \(3,\)"),
        ("step: text flag", r"step\(\) returned 'False' for a boolean"),
        ("step: two flags", "ValueError: The truth value of an array with more than one element"),
        ("step: info is none, late", "step 14: TypeError: its info is a NoneType, not a dict"),
        ("parts: another name, late", "step 12: ValueError: observation has no 'b', its space has"),
        ("reset: other shape", r"ValueError: observation has shape \(3,\), its space"),
    ],
)
def test_wrong_types_end_the_run_at_once(what, message, backend, caplog):
    """Another copy of the environment would return the same."""
    with pytest.raises(EnvironmentFailedError, match=message):
        play(
            odd(what, backend, max_restarts=5, info_metrics=("won",), kwargs={"length": 15}),
        )
    assert "rebuilding it" not in caplog.text


@pytest.mark.parametrize(
    ("backend", "built_before"), [("sync", 1), ("async", 2)]
)  # async builds one more to probe
@pytest.mark.parametrize("what", ["other shape", "other bounds", "other actions"])
def test_a_rebuilt_environment_with_other_spaces_ends_the_run(
    what, backend, built_before, tmp_path
):
    kwargs = {"fuse": str(tmp_path / "fuse"), "before": built_before}
    config = odd(what, backend, kwargs=kwargs, max_restarts=5)
    match = r"environment 0 .*its spaces are .*, but they were Box\(-1"
    with pytest.raises(EnvironmentFailedError, match=match):
        play(config)


@pytest.mark.parametrize("backend", BACKENDS)
def test_environments_with_different_spaces_are_rejected(backend, tmp_path):
    config = odd("other shape", backend, kwargs={"fuse": str(tmp_path / "fuse")}, num_envs=2)
    with pytest.raises(EnvironmentFailedError, match="its spaces are"):
        play(config, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_print_options_of_an_environment_make_no_other_spaces(backend, tmp_path):
    kwargs = {"fuse": str(tmp_path / "fuse")}
    with np.printoptions():
        play(odd("other print options", backend, kwargs=kwargs, max_restarts=5))


@pytest.mark.parametrize("what", ["other shape", "other actions"])
@pytest.mark.parametrize(("built_before", "purpose"), [(1, "training"), (2, "evaluation")])
def test_environments_unlike_the_probed_one_are_rejected(what, built_before, purpose, tmp_path):
    """Environments are built for probing, for training and for evaluation, in this order."""
    kwargs = f"++env.kwargs={{odd: {what}, fuse: {tmp_path}/fuse, before: {built_before}}}"
    described = job(tmp_path, "env.id=odd_envs:Odd-v0", kwargs, "env.backend=sync")
    with (
        pytest.raises(EnvironmentFailedError, match=rf"for {purpose} is .*, but it was "),
        open_run(described),
    ):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("env_id", ["odd_envs:Odd-v0", "odd_envs:OddBare-v0"])
def test_the_checks_are_removed_after_the_first_steps(env_id):
    plain = make_env(odd("", env_id=env_id))
    layers = str(plain)
    messages = []
    env, _ = check_first_steps(plain, messages.append)
    assert "_FirstSteps" in str(env)
    env.reset(seed=0)
    for _ in range(FIRST_STEPS + 1):
        env.step(0)
    env.unwrapped.odd = "step: outside"
    env.step(0)
    assert messages == []
    assert env_id.endswith("Bare-v0") or str(env) == layers


def test_evaluation_does_not_repeat_warnings(caplog):
    play(odd("step: outside").for_evaluation())
    assert not caplog.records


def test_the_number_of_warnings_is_limited(caplog):
    warn = WarnOnce("Some-v0")
    for number in range(3 * MAX_WARNINGS):
        warn(f"the number is {number}")
        warn("")
    assert len(caplog.records) == MAX_WARNINGS


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIGS.glob("*.yaml"))])
def test_presets_cause_no_warnings(name, caplog):
    config = preset(name)
    if config.backend == "ale" or name == "atari":
        pytest.skip("is not built one by one")
    with build_env(config, seed=0, num_envs=1) as env:
        rng = np.random.default_rng(0)
        env.reset()
        for _ in range(FIRST_STEPS + 2):
            env.step(sample_action(env.spec, rng))
    assert [record.getMessage() for record in caplog.records] == []


def _doubles(counter):
    right = counter._observation
    counter._observation = lambda: right().astype(np.float64)


def _other_space(counter):
    counter.action_space = gym.spaces.Discrete(7)


LATE = {
    "observations of another type": (_doubles, "step()` method was expecting numpy array dtype"),
    "another action space": (
        _other_space,
        "its action_space is Discrete(7) now; Discrete(3), that",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [{}, {"max_episode_steps": 9}], ids=["", "time limit"])
@pytest.mark.parametrize("change", LATE)
def test_a_step_now_and_then_is_checked_too(monkeypatch, caplog, backend, limit, change):
    """An environment that is fine in its first steps, and later not, is warned of once."""
    monkeypatch.setattr(vector, "CHECK_EVERY", 20)
    spoil, message = LATE[change]
    step, calls = Counter.step, []

    def late(env, action):
        calls.append(1)
        if len(calls) == 30:
            spoil(env)
        return step(env, action)

    monkeypatch.setattr(Counter, "step", late)
    config = settings(backend=backend, kwargs={"length": 12, **limit})
    play(config, steps=35)
    assert not caplog.text, "checked at the 20th step, before it is spoilt"
    calls.clear()
    play(config, steps=120)
    assert caplog.text.count(message) == 1


def test_a_late_violation_does_not_end_the_run(monkeypatch, caplog):
    monkeypatch.setattr(vector, "CHECK_EVERY", 20)
    step, calls = Counter.step, []

    def late(env, action):
        calls.append(1)
        return (*step(env, action)[:4], None if len(calls) > 15 else {})

    monkeypatch.setattr(Counter, "step", late)
    play(settings(), steps=50)
    assert "`info` returned by `step()` must be a python dictionary" in caplog.text
