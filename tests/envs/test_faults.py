"""A failing environment stops the run with its index and step, or is rebuilt, on every backend."""

from __future__ import annotations

from logging import Formatter

import numpy as np
import pytest
from toy_environments import Counter, CounterVector, settings

from steadyrl.core.errors import MemoryBudgetError, NonFiniteError, SettingError
from steadyrl.envs.factory import build_env
from steadyrl.envs.faults import HOUR, Faults, RestartBudget
from steadyrl.envs.types import EnvironmentFailedError

ZERO = np.zeros(1, np.int64)


def faulty(tmp_path, backend, fault, **changes):
    kwargs = {"fault": fault, "fuse": str(tmp_path / "fuse"), **changes.pop("kwargs", {})}
    timeout = 0.5 if fault.endswith("hang") else 20.0
    return settings(
        "toy_environments:ToyFaulty-v0",
        **{"backend": backend, "kwargs": kwargs, "step_timeout": timeout, **changes},
    )


HANGS = r"no answer within env\.step_timeout=0\.5 s \(\S+fault_kinds.py:\d+\)"

# (fault, error, message)
ANYWHERE = [
    ("step:raise", EnvironmentFailedError, r"environment 0 .*step 2.*TwoArgumentsError: this"),
    ("step:unpicklable", EnvironmentFailedError, "UnpicklableError: cannot travel"),
    ("step:speechless", EnvironmentFailedError, "SpeechlessError: its message cannot be read"),
    ("step:eof", EnvironmentFailedError, "step 2: EOFError: the file of the simulator ends"),
    ("step:broken_pipe", EnvironmentFailedError, "BrokenPipeError: .*the simulator is gone"),
    ("step:connection_reset", EnvironmentFailedError, "ConnectionResetError: .*hung up"),
    (
        "step:terminal",
        EnvironmentFailedError,
        r"RuntimeError: \[2J \]0;yours wiped the screen \(\S+:\d+\)$",
    ),
    ("step:cancelled", EnvironmentFailedError, "CancelledError: a task of mine"),
    ("constructor:eof", EnvironmentFailedError, "EOFError: the file of the simulator ends"),
    ("step:sys_exit", EnvironmentFailedError, "SystemExit: 3"),
    ("step:wrong_shape", EnvironmentFailedError, r"shape \(5,\), its space says \(2,\)"),
    ("step:wrong_type", EnvironmentFailedError, "its reward is .much., a str"),
    ("step:nan_reward", NonFiniteError, "reward of environment 0 is not finite at step 2"),
    ("step:inf_observation", NonFiniteError, r"observation of environment 0 .* step 2"),
    ("reset:raise", EnvironmentFailedError, "environment 0 failed at step 0"),
    ("constructor:raise", EnvironmentFailedError, "environment 0 failed at step 0"),
]
ONLY_PROCESSES = [
    ("step:exit", EnvironmentFailedError, r"environment 0 .*step 2.*exited with code 3"),
    ("step:kill", EnvironmentFailedError, r"environment 0 .*step 2.*killed by SIGKILL"),
    (
        "step:os_exit",
        EnvironmentFailedError,
        r"os\._exit\(3\) was called \(\S+fault_kinds.py:\d+\)",
    ),
    ("step:hang", EnvironmentFailedError, rf"environment 0 .*step 2.*{HANGS}"),
    ("reset:exit", EnvironmentFailedError, r"environment 0 .*exited with code 3"),
    ("reset:hang", EnvironmentFailedError, rf"environment 0 .*{HANGS}"),
    ("constructor:exit", EnvironmentFailedError, r"environment 0 .*exited with code 3"),
    ("constructor:hang", EnvironmentFailedError, rf"environment 0 .*{HANGS}"),
]
CASES = [("sync", *case) for case in ANYWHERE]
CASES += [("async", *case) for case in ANYWHERE + ONLY_PROCESSES]


@pytest.mark.parametrize(("backend", "fault", "error", "message"), CASES)
def test_a_fault_without_restarts_stops_with_environment_and_step(
    tmp_path, backend, fault, error, message
):
    with (
        pytest.raises(error, match=message),
        build_env(faulty(tmp_path, backend, fault), seed=0) as env,
    ):
        env.reset()
        for _ in range(5):
            env.step(ZERO)


@pytest.mark.filterwarnings("error")
def test_a_reward_beyond_float32_is_not_finite_where_warnings_are_errors(tmp_path):
    """Else NumPy warns, and the run ends in the same way."""
    with build_env(faulty(tmp_path, "sync", "step:huge_reward"), seed=0) as env:
        env.reset()
        for _ in range(2):
            env.step(ZERO)
        with pytest.raises(NonFiniteError, match=r"reward of environment 0 .* it is -inf"):
            env.step(ZERO)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_number_that_is_not_finite_is_named_by_its_part_of_the_observation(backend):
    with build_env(settings("toy_environments:TwoParts-v0", backend=backend), seed=0) as env:
        env.reset()
        env.step(ZERO)
        place = r"observation of environment 0 .* 'arm': 0: element \[1, 0\] is nan"
        with pytest.raises(NonFiniteError, match=place):
            env.step(ZERO)


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        case[:2]
        for case in CASES
        if case[1].startswith("step") and not case[1].endswith(("wrong_shape", "wrong_type"))
    ],  # wrong types are not rebuilt
)
def test_a_fault_with_restarts_cuts_the_episode(tmp_path, backend, fault, caplog):
    config = faulty(tmp_path, backend, fault, num_envs=2, max_restarts=2)
    both = np.zeros(2, np.int64)
    with build_env(config, seed=0) as env:
        env.reset()
        valid = [env.step(both).valid.all() for _ in range(2)]
        reset_step = env.step(both)  # the third step fails in one environment or both
        broken = np.flatnonzero(~reset_step.valid)
        assert all(valid)
        assert broken.size > 0
        assert (reset_step.obs[broken] == [0, 1]).all()
        assert (reset_step.obs[reset_step.valid] == [3, 1]).all()
        assert (reset_step.reward == reset_step.valid).all()
        assert not (reset_step.terminated | reset_step.truncated).any()
        lengths = {}
        for _ in range(10):
            lengths.update({e.env: (e.length, e.return_) for e in env.step(both).episodes})
        assert lengths == {0: (10, 10.0), 1: (10, 10.0)}
    assert f"environment {broken[0]}" in caplog.text
    if not fault.endswith((":exit", "kill")) and not (
        fault.endswith(("nan_reward", "inf_observation"))
    ):
        assert "toy_environments.py" in caplog.text  # file of the failure


@pytest.mark.parametrize(
    ("backend", "fault"), [case[:2] for case in CASES if not case[1].startswith("step")]
)
def test_a_failing_reset_or_constructor_is_retried(tmp_path, backend, fault):
    config = faulty(tmp_path, backend, fault, max_restarts=2, kwargs={"times": 2})
    with build_env(config, seed=0) as env:
        env.reset()
        assert env.step(ZERO).valid.all()


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_fault_after_the_last_restart_stops(tmp_path, backend):
    config = faulty(tmp_path, backend, "step:raise", max_restarts=2, kwargs={"times": 100})
    with build_env(config, seed=0) as env:
        env.reset()
        for _ in range(8):  # fails in every third step of an episode
            env.step(ZERO)
        with pytest.raises(EnvironmentFailedError):
            env.step(ZERO)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_state_saved_after_a_restart_is_restored(tmp_path, backend):
    config = faulty(tmp_path, backend, "step:raise", max_restarts=1)
    with build_env(config, seed=0) as env, build_env(config, seed=0) as other:
        env.reset()
        for _ in range(5):
            env.step(ZERO)
        other.load_state_dict(env.state_dict())
        np.testing.assert_array_equal(other.observation, env.observation)
        np.testing.assert_array_equal(other.step(ZERO).obs, env.step(ZERO).obs)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_log_messages_of_faults_do_not_grow(tmp_path, backend, caplog):
    config = faulty(tmp_path, backend, "step:raise", max_restarts=10, kwargs={"times": 10})
    with build_env(config, seed=0) as env:
        env.reset()
        for _ in range(40):
            env.step(ZERO)
    messages = [Formatter().format(record) for record in caplog.records if record.exc_info]
    assert len(messages) == 10
    assert len({text.count("\n") for text in messages}) == 1
    assert all(text.count("TwoArgumentsError: this and that") <= 3 for text in messages)


def test_restarts_are_limited_per_hour():
    now = [0.0]
    budget = RestartBudget(2, clock=lambda: now[0])
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    now[0] = HOUR - 1
    assert not budget.spend()
    now[0] = HOUR
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    assert not RestartBudget(0).spend()


@pytest.mark.parametrize(("steps", "under_way"), [(0, False), (500, True)])
def test_a_worker_killed_for_memory_between_evaluations_ends_a_run_under_way(steps, under_way):
    """An evaluation counts its own steps from 0 each time; the run is saved all the same."""
    faults, error = Faults(5, "evaluation's "), MemoryBudgetError("killed for lack of memory")
    faults.counted = lambda: steps
    if under_way:
        faults.handle_failure(0, error)
        assert "environment 0 failed at step 500" in str(faults.memory_error)
    with pytest.raises(MemoryBudgetError):
        faults.handle_failure(0, error)


@pytest.fixture
def balance():
    Counter.opened = Counter.closed = 0
    yield
    assert Counter.opened == Counter.closed > 0


@pytest.mark.usefixtures("balance")
def test_closing_closes_all_environments():
    with build_env(settings(num_envs=3), seed=0) as env:
        env.reset()
    env.close()


@pytest.mark.usefixtures("balance")
def test_a_failing_constructor_closes_the_other_environments():
    with pytest.raises(EnvironmentFailedError, match=r"environment 2 .*no more of me"):
        build_env(settings(num_envs=3, kwargs={"fail_at_build": 2}), seed=0)


@pytest.mark.usefixtures("balance")
def test_a_failing_reset_closes_all_environments():
    config = settings(num_envs=3, kwargs={"fail_at_reset": 1})
    with (
        pytest.raises(EnvironmentFailedError, match="cannot reset"),
        build_env(config, seed=0) as env,
    ):
        env.reset()


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_invalid_keywords_are_rejected_without_restarts(backend):
    config = settings("CartPole-v1", backend=backend, kwargs={"sutton": 1}, max_restarts=3)
    with pytest.raises(SettingError, match="sutton"):
        build_env(config, seed=0)


def test_a_failing_kernel_stops_with_the_step():
    with (
        build_env(settings("own_kernels:Broken-v0", backend="kernel"), seed=0) as env,
        pytest.raises(EnvironmentFailedError, match="failed at step 0: RuntimeError: worn out"),
    ):
        env.reset()


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_failing_vector_environment_stops_with_the_step(monkeypatch, where):
    def break_down(*_, **__):
        raise RuntimeError("worn\nout")

    monkeypatch.setattr(CounterVector, where, break_down)
    with (
        build_env(settings(backend="batch"), seed=0) as env,
        pytest.raises(EnvironmentFailedError, match="failed at step 0: RuntimeError: worn out"),
    ):
        env.reset()
        env.step(ZERO)


def test_the_reward_of_a_reset_of_a_batch_is_ignored(monkeypatch):
    """A simulator may divide by what is 0 there."""
    step = CounterVector.step

    def divided(env, actions):
        over = env.before
        obs, reward, *rest = step(env, actions)
        return obs, np.where(over, np.nan, reward), *rest

    monkeypatch.setattr(CounterVector, "step", divided)
    with build_env(settings(backend="batch", num_envs=2), seed=0) as env:
        env.reset()
        steps = [env.step(np.zeros(2, np.int64)) for _ in range(9)]
    assert all(np.isfinite(step.reward).all() for step in steps)
    assert any(not step.valid.all() for step in steps)


def change_result(monkeypatch, position, change):
    """Let a simulator's steps return another value at `position`; return that value's name."""
    step = CounterVector.step

    def changed(env, actions):
        result = list(step(env, actions))
        result[position] = change(result[position])
        return tuple(result)

    monkeypatch.setattr(CounterVector, "step", changed)
    return ("reward", "terminated", "truncated")[position - 1]


@pytest.mark.parametrize("value", [1.0, np.ones(1)])
@pytest.mark.parametrize("position", [1, 2, 3])
def test_values_are_not_broadcast_over_environments(monkeypatch, position, value):
    name = change_result(monkeypatch, position, lambda _: value)
    match = rf"failed at step 0: ValueError: {name} has shape \(1?,?\), not \(2,\)"
    with build_env(settings(backend="batch", num_envs=2), seed=0) as env:
        env.reset()
        with pytest.raises(EnvironmentFailedError, match=match):
            env.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("position", "kind"), [(1, "U1"), (1, "m8[s]"), (1, complex), (1, object), (2, "U5"), (3, "S5")]
)
def test_rewards_and_flags_of_a_simulator_are_numbers(monkeypatch, position, kind):
    name = change_result(monkeypatch, position, lambda given: given.astype(int).astype(kind))
    match = rf"failed at step 0: ValueError: {name} is an array of .*, expected numbers"
    with build_env(settings(backend="batch", num_envs=2), seed=0) as env:
        env.reset()
        with pytest.raises(EnvironmentFailedError, match=match):
            env.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("position", [2, 3])
@pytest.mark.parametrize("envs", [1, 2])
def test_a_simulator_whose_episodes_end_as_they_begin_is_refused(monkeypatch, position, envs):
    change_result(monkeypatch, position, lambda _: np.arange(2) < envs)
    match = "terminated or truncated is true in the step that began an episode"
    with build_env(settings(backend="batch", num_envs=2), seed=0) as env:
        env.reset()
        assert env.step(np.zeros(2, np.int64)).valid.all()
        with pytest.raises(EnvironmentFailedError, match=match):
            env.step(np.zeros(2, np.int64))


WRONG_RESULTS = {
    "four values": ("step", lambda obs, *_: (obs, 0.0, False, {}), "4 values, not .*two flags"),
    "six values": ("step", lambda obs, *_: (obs, 0.0, False, False, {}, 1), "not .observation, re"),
    "nothing": ("step", lambda *_: None, "a NoneType, not .observation, reward"),
    "no info": ("reset", lambda obs, *_: np.zeros(3), "not .observation, info"),
}


@pytest.mark.parametrize("kwargs", [{}, {"max_episode_steps": 50}], ids=["", "time limit"])
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("wrong", WRONG_RESULTS)
def test_a_result_of_wrong_length_is_named_whenever_it_comes(monkeypatch, backend, kwargs, wrong):
    """The first steps are checked; later, unpacking fails, here or in a wrapper of Gymnasium's."""
    method, result, message = WRONG_RESULTS[wrong]
    right, calls = getattr(Counter, method), []

    def late(env, *arguments, **keywords):
        calls.append(1)
        given = right(env, *arguments, **keywords)
        return given if len(calls) < (4 if method == "reset" else 20) else result(given[0])

    monkeypatch.setattr(Counter, method, late)
    config = settings(backend=backend, kwargs={"length": 12, **kwargs}, max_restarts=5)
    with (
        build_env(config, seed=0) as env,
        pytest.raises(EnvironmentFailedError, match=rf"{method}\(\) returned .*{message}"),
    ):
        env.reset()
        for _ in range(60):
            env.step(ZERO)


def test_an_unpacking_error_of_user_code_is_its_own(monkeypatch):
    def step(env, action):
        a, b, c, d, e = (1, 2, 3, 4)
        return a, b, c, d, e

    monkeypatch.setattr(Counter, "step", step)
    with (
        build_env(settings(backend="sync", max_restarts=0), seed=0) as env,
        pytest.raises(EnvironmentFailedError, match=r"ValueError: not enough.*test_faults\.py"),
    ):
        env.reset()
        env.step(ZERO)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_reset_without_seed_is_not_rebuilt(monkeypatch, backend, caplog):
    def reset(env):
        return np.zeros(3), {}

    monkeypatch.setattr(Counter, "reset", reset)
    with (
        build_env(settings(backend=backend, max_restarts=5), seed=0) as env,
        pytest.raises(EnvironmentFailedError, match=r"reset\(\) takes no seed: Gymnasium's is"),
    ):
        env.reset()
    assert "rebuilding" not in caplog.text
