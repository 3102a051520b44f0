"""Errors in user code: the error line names file and line, the user's stack frames follow."""

from __future__ import annotations

import re
from pathlib import Path

import failing_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from toy_environments import settings

from steadyrl.agents.distillation.teacher import ObjectTeacher, TeacherError
from steadyrl.core.errors import ExpectedError, SettingError, error_lines, exit_with
from steadyrl.core.user_frames import place_of, shown_frames, user_frames
from steadyrl.envs.backends.batch import VectorEntryPoint
from steadyrl.envs.factory import BACKENDS, build_env, probe
from steadyrl.envs.types import DiscreteActions, EnvironmentFailedError
from steadyrl.training.sweeps.job_run import _in_process

FILE = Path(failing_envs.__file__)
LINE = 1 + next(i for i, x in enumerate(FILE.read_text().splitlines()) if "FAILS HERE" in x)
PLACE = f"failing_envs.py:{LINE}"
ENV_ID = "failing_envs:Failing-v0"


def failure_of(config, *, num_envs=2, steps=3):
    """Build and step environments that fail; return the error."""
    with (
        pytest.raises(ExpectedError) as caught,
        build_env(config, seed=0, num_envs=num_envs) as env,
    ):
        env.reset()
        for _ in range(steps):
            env.step(env.observation[:, 0].astype("int64") * 0)
    return caught.value


FAILURES = {
    "init": {"kwargs": {"where": "init"}},
    "reset": {"kwargs": {"where": "reset"}},
    "step": {"kwargs": {"where": "step"}},
    "wrapper's init": {"wrappers": ({"failing_envs:FailingWrapper": {"where": "init"}},)},
    "wrapper's step": {"wrappers": ({"failing_envs:FailingWrapper": {"where": "step"}},)},
    "reward function": {"wrappers": ("failing_envs:rewarded",)},
}
BATCH = ("reset", "step")


@pytest.mark.parametrize(
    ("backend", "failure"),
    [*((b, w) for b in ("sync", "async") for w in FAILURES), *(("batch", w) for w in BATCH)],
)
def test_errors_show_file_line_and_user_frames(backend, failure, capsys):
    error = failure_of(settings(ENV_ID, backend=backend, **FAILURES[failure]))
    assert f"{PLACE})" in str(error)
    with pytest.raises(SystemExit):
        exit_with(error)
    line, *frames = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and PLACE in line
    assert frames and all("failing_envs.py:" in frame for frame in frames)
    assert PLACE in frames[-1] and "in look_up: return LEVELS[level]" in frames[-1]


class Wrong(gym.Env):
    """Returns a wrong observation, reward or flag in its second step, or from `reset`."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self, fault):
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(3 if self.fault == "reset" else 2, np.float32), {}

    def step(self, action):
        self.steps += 1
        good = np.zeros(2, np.float32), 0.0, False, False, {}
        wrong = {
            "shape": (np.zeros(3, np.float32), *good[1:]),
            "nan": (good[0] + np.nan, *good[1:]),
            "last nan": (good[0] + np.nan, 0.0, True, False, {}),
            "reward": (good[0], None, True, False, {}),
            "flag": (*good[:2], "False", *good[3:]),
            "values": good[1:],
        }
        return wrong[self.fault] if self.steps == 2 else good


gym.register("WrongResults-v0", Wrong)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("fault", ["reset", "shape", "nan", "last nan", "reward", "flag", "values"])
def test_errors_of_wrong_results_show_where_the_method_is_defined(backend, fault, capsys):
    error = failure_of(settings("WrongResults-v0", backend=backend, kwargs={"fault": fault}))
    with pytest.raises(SystemExit):
        exit_with(error)
    line, frame = capsys.readouterr().err.splitlines()
    method = "reset" if fault == "reset" else "step"
    defined = getattr(Wrong, method).__code__.co_firstlineno
    place = rf"  \S*{Path(__file__).name}:{defined} in {method}: def {method}\(self,.*"
    assert line.startswith("error: ") and re.fullmatch(place, frame)


class WrongMask(Wrong):
    """Gives no mask in its second step, or a wrong one from action_masks()."""

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset()
        return observation, {"action_mask": np.ones(2, np.int8)}

    def step(self, action):
        self.steps += 1
        mask = {} if self.steps == 2 else {"action_mask": np.ones(2, np.int8)}
        return np.zeros(2, np.float32), 0.0, False, False, mask


class WrongMasks(WrongMask):
    def action_masks(self):
        if self.fault == "raises" and self.steps == 2:
            return {}["door"]
        return np.full(2, self.steps != 2)


gym.register("WrongMask-v0", WrongMask)
gym.register("WrongMasks-v0", WrongMasks)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("env_id", "fault", "method"),
    [
        ("WrongMask-v0", "", WrongMask.step),
        ("WrongMasks-v0", "forbids", WrongMasks.action_masks),
    ],
)
def test_errors_of_masks_show_the_method_that_returned_them(backend, env_id, fault, method, capsys):
    kwargs = {"fault": fault}
    error = failure_of(settings(env_id, backend=backend, kwargs=kwargs, action_masks="auto"))
    with pytest.raises(SystemExit):
        exit_with(error)
    _, frame = capsys.readouterr().err.splitlines()
    assert f"{Path(__file__).name}:{method.__code__.co_firstlineno} in {method.__name__}" in frame


def test_a_key_error_in_action_masks_is_not_a_missing_mask():
    config = settings("WrongMasks-v0", kwargs={"fault": "raises"}, action_masks="auto")
    assert f"KeyError: 'door' ({Path(__file__).relative_to(Path.cwd())}" in str(failure_of(config))


@pytest.mark.parametrize("num_envs", [1, 2])
def test_errors_while_probing_show_file_and_line(num_envs, capsys):
    with pytest.raises(SettingError) as caught:
        probe(settings(ENV_ID, backend="auto", num_envs=num_envs, kwargs={"where": "init"}))
    renamed = SettingError("env.id", ENV_ID, caught.value.reason)
    try:
        try:
            raise caught.value
        except SettingError:
            raise renamed from None  # as the program does, to give the full key
    except SettingError as error:
        with pytest.raises(SystemExit):
            exit_with(error)
    line, *frames = capsys.readouterr().err.splitlines()
    assert PLACE in line and PLACE in frames[-1]


@pytest.mark.parametrize("backend", ["sync", "async", "batch"])
def test_errors_of_evaluation_environments_say_evaluation(backend):
    config = settings(ENV_ID, backend=backend, kwargs={"where": "step"}).for_evaluation()
    assert str(failure_of(config)).startswith("evaluation's ")


def test_errors_when_sending_actions_show_file_and_line(monkeypatch):
    class Begins(VectorEntryPoint):
        def _send(self, action):
            failing_envs.look_up()

    monkeypatch.setitem(BACKENDS, "batch", Begins)
    assert f"{PLACE})" in str(failure_of(settings(ENV_ID, backend="batch")))


def test_errors_while_replaying_a_saved_episode_show_file_and_line(monkeypatch):
    config = settings(ENV_ID)
    with build_env(config, seed=0) as one, build_env(config, seed=0) as other:
        one.reset()
        one.step(np.zeros(1, np.int64))
        monkeypatch.setattr(failing_envs.Failing, "fail", failing_envs.Failing.fail_at_once)
        with pytest.raises(EnvironmentFailedError, match=r"environment 0 failed .*failing_envs"):
            other.load_state_dict(one.state_dict())


def test_missing_imports_show_file_and_line(monkeypatch):
    monkeypatch.setattr(failing_envs.Failing, "fail", failing_envs.Failing.import_nothing)
    with pytest.raises(
        SettingError, match=r"No module named 'no_such_module' \(.*failing_envs.py:"
    ):
        probe(settings(ENV_ID, num_envs=1))


def test_errors_of_teachers_show_file_and_line():
    teacher = ObjectTeacher("mine:Bad", DiscreteActions(3), failing_envs.look_up)
    with pytest.raises(TeacherError) as caught:
        teacher.predict(torch.zeros(5, 4))
    assert f"{PLACE})" in str(caught.value)
    assert PLACE in error_lines(caught.value)[-1]


def test_errors_of_sweep_jobs_show_user_frames(capsys):
    def train():
        raise failure_of(settings(ENV_ID, kwargs={"where": "step"}))

    outcome = _in_process(train)
    assert outcome.exit_code == 4 and PLACE in (outcome.error or "")
    line, *frames = capsys.readouterr().out.splitlines()
    assert PLACE in line and PLACE in frames[-1]


def test_long_messages_are_shortened_before_file_and_line(monkeypatch):
    class Talkative(dict):
        def __missing__(self, key):
            raise KeyError("word " * 1000)

    monkeypatch.setattr(failing_envs, "LEVELS", Talkative())
    error = failure_of(settings(ENV_ID, kwargs={"where": "step"}))
    assert len(str(error)) < 400 and "…" in str(error) and ".py:" in str(error)


def test_frames_of_steadyrl_and_libraries_are_not_user_frames(capsys):
    with pytest.raises(SettingError) as caught:
        settings("")
    names = {Path(frame.filename).name for frame in user_frames(caught.value)}
    assert names == {Path(__file__).name, "toy_environments.py"}
    with pytest.raises(SystemExit):
        exit_with(caught.value)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_frames_of_extension_modules_are_not_user_frames():
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.load("a: [1", yaml.CSafeLoader)
    assert any(str(frame.path).endswith(".pyx") for frame in caught.traceback)
    assert [Path(frame.filename) for frame in user_frames(caught.value)] == [Path(__file__)]


def test_an_unraised_error_has_no_frames():
    assert shown_frames(ValueError("x")) == () and place_of(ValueError("x")) == ""
