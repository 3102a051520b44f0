"""Worker processes: replacement, cleanup, signals, start methods, equality with sync."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from toy_environments import settings

from steadyrl.core.errors import SettingError
from steadyrl.envs.arithmetic import flush_subnormals, flushes_subnormals
from steadyrl.envs.backends import worker_handle
from steadyrl.envs.factory import build_env

ZEROS = np.zeros(3, np.int64)


def children():
    return psutil.Process().children()


def resources():
    process = psutil.Process()
    return process.num_fds(), process.num_threads(), len(process.children())


def test_killed_workers_are_replaced_without_leaking_resources():
    config = settings(backend="async", num_envs=3, max_restarts=9)
    build_env(config, seed=0).close()  # allocates the shared memory, which is reused
    before = resources()
    with build_env(config, seed=0) as env:
        env.reset()
        running = resources()
        assert running[2] == before[2] + 3
        for _ in range(6):
            children()[-1].kill()
            assert env.step(ZEROS).valid.tolist().count(False) >= 1
            assert env.step(ZEROS).valid.any()
            assert resources() == running
    assert resources() == before


def test_close_ends_a_hanging_worker(tmp_path):
    kwargs = {"fault": "step:hang", "at": 1, "fuse": str(tmp_path / "fuse")}
    config = settings("toy_environments:ToyFaulty-v0", backend="async", num_envs=2, kwargs=kwargs)
    others = set(children())  # started by another test
    with build_env(config, seed=0) as env:
        env.reset()
        workers = set(children()) - others
        env.send(np.zeros(2, np.int64))
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)


def test_workers_compute_with_torch_after_the_trainer_has_used_its_threads():
    config = settings("broken_envs:Computing-v0", backend="async", max_restarts=0, step_timeout=20)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(300_000).sin_().sum()
        with build_env(config, seed=0) as env:
            env.reset()
            for _ in range(3):
                assert env.step(np.zeros(1, np.int64)).valid.all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_workers_leave_signals_to_the_trainer(number):
    others = set(children())
    with build_env(settings("CartPole-v1", backend="async", num_envs=3), seed=0) as env:
        env.reset()
        for worker in set(children()) - others:
            worker.send_signal(signal.Signals[number])
        for _ in range(20):
            assert env.step(ZEROS).valid.any()


def test_a_program_that_leaves_its_environments_open_ends():
    code = (
        "from toy_environments import settings\n"
        "from steadyrl.envs.factory import build_env\n"
        "env = build_env(settings('CartPole-v1', backend='async', num_envs=2), seed=0)\n"
        "env.reset()\n"
    )
    root = Path(__file__).parents[3]
    search = os.pathsep.join([str(root / "tests" / "helpers"), str(root)])
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": search},
        check=True,
        timeout=300,
    )


SCRIPT = textwrap.dedent(
    """
    import os, sys
    sys.path.insert(0, sys.argv[1])
    import numpy as np, psutil
    from toy_environments import settings
    from steadyrl.envs.factory import build_env
    kwargs = {"fault": "step:hang", "at": 1, "fuse": sys.argv[2], "times": 1}
    config = settings("toy_environments:ToyFaulty-v0", backend="async", num_envs=3, kwargs=kwargs)
    env = build_env(config, seed=0)
    env.reset()
    env.send(np.zeros(3, np.int64))
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    env.receive()
    """
)


def test_workers_end_when_the_parent_is_killed(tmp_path):
    root = Path(__file__).parents[3]
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(root / "tests" / "helpers"), str(tmp_path / "fuse")],
        stdout=subprocess.PIPE,
        cwd=root,
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    watched = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for fd in watched:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(2000), "a process outlived its parent by two seconds"
        os.close(fd)


STOPPED = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    import numpy as np, psutil
    from toy_environments import settings
    from steadyrl.envs.factory import build_env
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    kwargs = {"fault": "step:until_told", "at": 1, "fuse": sys.argv[2]}
    config = settings(
        "toy_environments:ToyFaulty-v0", backend="async", kwargs=kwargs, step_timeout=6.0
    )
    with build_env(config, seed=0) as env:
        env.reset()
        [worker] = psutil.Process().children()
        env.send(np.zeros(1, np.int64))
        print(worker.pid, flush=True)
        print(*env.receive().valid, flush=True)
    """
)


@pytest.mark.long
def test_a_pause_of_the_whole_run_is_no_hanging_environment(tmp_path):
    root, fuse = Path(__file__).parents[3], tmp_path / "fuse"
    command = [sys.executable, "-c", STOPPED, str(root / "tests" / "helpers"), str(fuse)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) as run:
        worker = psutil.Process(int(run.stdout.readline()))
        paused = [psutil.Process(run.pid), worker]
        while not fuse.exists() or not fuse.stat().st_size or paused[0].status() != "sleeping":
            pass  # until the environment steps and the run waits for it
        for process in paused:
            process.suspend()
        time.sleep(6.5)  # longer than env.step_timeout
        for process in reversed(paused):
            process.resume()
        time.sleep(0.5)  # the run looks at the clock
        worker.send_signal(signal.SIGUSR2)
        assert run.stdout.read() == "True\n"


def test_a_deadline_stands_still_between_looks_that_are_far_apart(monkeypatch):
    now = 100.0
    monkeypatch.setattr(worker_handle.time, "monotonic", lambda: now)
    deadline = worker_handle.Deadline(3.0)
    found = []
    for passes in (0.5, 60.0, 0.5, 0.5, 0.5, 0.5, 0.5):
        now += passes
        found.append(round(deadline.left(), 6))
    assert found == [2.5, 2.3, 1.8, 1.3, 0.8, 0.3, -0.2]


def test_spawned_workers_give_the_same_steps(monkeypatch):
    monkeypatch.setattr(worker_handle, "start_methods", lambda: ("spawn",))
    with (
        build_env(settings("CartPole-v1", backend="async"), seed=3) as one,
        build_env(settings("CartPole-v1"), seed=3) as other,
    ):
        np.testing.assert_array_equal(one.reset(), other.reset())
        for _ in range(30):
            action = np.zeros(1, np.int64)
            for a, b in zip(one.step(action), other.step(action), strict=True):
                np.testing.assert_array_equal(a, b)


def test_an_id_of_this_program_only_is_refused_with_what_to_write(monkeypatch):
    monkeypatch.setattr(worker_handle, "start_methods", lambda: ("spawn",))
    monkeypatch.setitem(gym.registry, "Cart-v0", gym.spec("CartPole-v1"))
    with pytest.raises(SettingError, match=r"as module:Cart-v0, or env\.backend=sync"):
        build_env(settings("Cart-v0", backend="async"), seed=0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("flushes", [True, False])
def test_workers_treat_subnormal_numbers_as_the_trainer_does(monkeypatch, method, flushes):
    monkeypatch.setattr(worker_handle, "start_methods", lambda: (method,))
    torch.set_flush_denormal(flushes)
    assert flushes_subnormals() == flushes
    with (
        build_env(settings("toy_environments:Tiny-v0", backend="async"), seed=0) as one,
        build_env(settings("toy_environments:Tiny-v0"), seed=0) as other,
    ):
        one.reset()
        other.reset()
        for _ in range(3):
            # Compare bits: with flush-to-zero, subnormal numbers compare equal to 0.
            found, expected = (env.step(ZEROS[:1]).obs.view(np.int32) for env in (one, other))
            np.testing.assert_array_equal(found, expected)
            assert (found[0, 0] == 0) == flushes
    flush_subnormals(not flushes)
    assert (torch.full((1,), 2e-38) * 0.1).count_nonzero() == flushes


def test_a_failing_fork_falls_back_to_spawn(monkeypatch, caplog):
    def refuse():
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", refuse)
    with build_env(settings("CartPole-v1", backend="async"), seed=0) as env:
        assert env.reset().shape == (1, 4)
    assert "cannot fork" in caplog.text


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_async_steps_equal_sync_steps(env_id):
    rng = np.random.default_rng(0)
    with (
        build_env(settings(env_id, backend="async", num_envs=3, frame_stack=2), seed=1) as one,
        build_env(settings(env_id, num_envs=3, frame_stack=2), seed=1) as other,
    ):
        np.testing.assert_array_equal(one.reset(), other.reset())
        for _ in range(250):
            action = rng.integers(0, 2, 3)
            if env_id == "Pendulum-v1":
                action = rng.normal(0, 2, (3, 1)).astype(np.float32)
            one.send(action)
            expected = other.step(action)
            for a, b in zip(one.receive(), expected, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("kind", "send"),
    [
        ("discrete", lambda rng: rng.integers(0, 5, 3)),
        ("multi discrete", lambda rng: rng.integers(0, 2, (3, 4))),
        ("multi binary", lambda rng: rng.integers(0, 2, (3, 6), np.int8)),
        ("box", lambda rng: rng.normal(0, 0.3, (3, 4)).astype(np.float32)),
    ],
)
def test_async_sends_actions_of_every_kind_like_sync(kind, send):
    config, rng = {"num_envs": 3, "kwargs": {"kind": kind}}, np.random.default_rng(0)
    async_settings = settings("toy_environments:Echo-v0", backend="async", **config)
    sync_settings = settings("toy_environments:Echo-v0", **config)
    with build_env(async_settings, seed=0) as one, build_env(sync_settings, seed=0) as other:
        one.reset()
        other.reset()
        for _ in range(70):  # more than one block of replayed actions
            action = send(rng)
            obs = one.step(action).obs
            assert obs.any()
            np.testing.assert_array_equal(obs, other.step(action).obs)
        one.load_state_dict(one.state_dict())
        assert one.step(action).valid.all()


def test_workers_are_spawned_once_cuda_is_initialised(monkeypatch):
    assert worker_handle.start_methods()[0] == "fork"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert worker_handle.start_methods() == ("spawn",)
