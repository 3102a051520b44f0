"""What an environment does to its process does not reach ours, as far as that can be."""

from __future__ import annotations

import errno
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading

import command
import numpy as np
import psutil
import pytest
import warm
from family_env import FAMILY
from toy_environments import settings

from steadyrl.envs.factory import build_env
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.memory.process import usable_cores

HOSTILE = "env.id=hostile_envs:Hostile-v0"
PROCESSES = ("os._exit", "segfault", "hang")


def hostile(where, harm, *more):
    return (HOSTILE, f"env.kwargs.where={where}", f"env.kwargs.harm={harm}", *more)


def told(folder, *overrides, code):
    directory, _, text = warm.run(folder, *overrides, "env.step_timeout=1", code=code)
    [line] = [line for line in text.splitlines() if not line.startswith("  ")]  # frames are
    assert directory is None
    return line


@pytest.mark.parametrize("harm", ["SystemExit", *PROCESSES])
def test_a_constructor_in_a_process_cannot_end_the_trainer(tmp_path, harm):
    text = told(tmp_path, *hostile("constructor", harm), "env.backend=async", code=4)
    assert "hostile_envs:Hostile-v0 cannot be built" in text


@pytest.mark.skipif(usable_cores() == 1, reason="auto uses no processes on one core")
@pytest.mark.parametrize("harm", PROCESSES)
def test_what_may_get_processes_is_tried_in_one(tmp_path, harm):
    many = ("env.backend=auto", "env.num_envs=2")
    assert "cannot be built" in told(tmp_path, *hostile("constructor", harm), *many, code=4)


def test_a_constructor_in_the_trainer_that_exits_is_a_failure(tmp_path):
    text = told(tmp_path, *hostile("constructor", "SystemExit"), code=4)
    assert "hostile_envs:Hostile-v0 cannot be built: SystemExit: 0" in text


def test_what_no_memory_is_large_enough_to_see_is_refused_for_that(tmp_path):
    large = (HOSTILE, f"env.kwargs.states={2**50}", "env.backend=sync")
    directory, _, text = warm.run(tmp_path, *large, code=7)
    assert directory is None and "error: out of memory" in text and "PiB" in text


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_constructor_that_raises_is_a_wrong_setting_on_any_backend(tmp_path, backend):
    raising = hostile("constructor", "KeyError", f"env.backend={backend}")
    text = told(tmp_path, *raising, code=2)
    assert "env.id=hostile_envs:Hostile-v0: cannot be built: KeyError: 'a level'" in text


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_environment_in_the_trainer_that_exits_is_a_failure(tmp_path, where):
    exits = hostile(where, "SystemExit", "env.max_restarts=0")
    _, summary, text = warm.run(tmp_path, *exits, code=4)
    assert "environment 0 failed at step 0: SystemExit: 0" in text
    assert summary["status"] == "failed"


@pytest.mark.parametrize("where", ["constructor", "step"])
@pytest.mark.parametrize("begins", ["dqn agent.learning_starts=200", "ppo agent.rollout_steps=50"])
def test_an_environment_that_needs_no_gradients_leaves_training_its_own(tmp_path, begins, where):
    short = f"agent={begins} agent.compile=false total_steps=400 eval.every=0 device=cpu".split()
    hashes = set()
    for place in (where, "nowhere"):
        run = (*short, *hostile(place, "gradients"))
        _, summary, _ = warm.run(tmp_path, *run, quick=False)
        assert summary["updates"]
        hashes.add(summary["weights_sha256"])
    assert len(hashes) == 1


def test_an_environment_that_takes_threads_leaves_training_its_own(tmp_path):
    _, _, text = warm.run(tmp_path, *hostile("constructor", "threads"), "threads=1", "eval.every=0")
    assert "seed 0, cpu, 1 thread\n" in text


@pytest.mark.parametrize("harm", ["dtype", "device"])
def test_other_tensors_for_the_whole_process_need_a_process(tmp_path, harm):
    short = ("total_steps=300", "eval.every=0")
    directory, _, text = warm.run(tmp_path, *hostile("constructor", harm), *short, code=4)
    assert directory is None
    assert f"hostile_envs:Hostile-v0 has set torch's default {harm} to " in text
    _, summary, _ = warm.run(tmp_path, *hostile("constructor", harm, "env.backend=async"), *short)
    assert summary["status"] == "finished"


@pytest.mark.parametrize("harm", ["SystemExit", *PROCESSES])
def test_closing_in_a_process_cannot_harm_the_trainer(tmp_path, harm):
    short = ("total_steps=300", "eval.every=0", "env.backend=async")
    _, summary, _ = warm.run(tmp_path, *hostile("close", harm), *short)
    assert summary["status"] == "finished"


def test_with_async_no_code_of_the_environment_runs_in_the_trainer(tmp_path):
    traces = tmp_path / "traces"
    short = (HOSTILE, "env.backend=async", "total_steps=300", "eval.every=200")
    process = warm.Process(tmp_path, [*command.QUICK, *short], {"TRACES": str(traces)})
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    seen = set(traces.read_text().split())
    assert len(seen) >= 3  # probed, trained in and evaluated in
    assert str(process.pid) not in seen


def test_too_few_files_for_all_processes_are_named(tmp_path):
    script = 'ulimit -n 32; exec "$@" 2>&1'
    many = ("env.backend=async", "env.num_envs=30", "eval.every=0")
    text = told_by_shell(script, tmp_path, *many)
    assert "can have no process: Too many open files" in text
    assert "(ulimit -n) is 32" in text


def told_by_shell(script, folder, *overrides):
    train = [sys.executable, str(command.ROOT / "train.py"), *command.QUICK, *overrides]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *train],
        cwd=folder, env=command.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 4, done.stdout
    return done.stdout


def test_too_few_processes_are_named(monkeypatch):
    def refuse():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(EnvironmentFailedError, match=r"can have no process: .*ulimit -u"):
        build_env(settings("CartPole-v1", backend="async"), seed=0)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_directory_of_shared_memory_that_cannot_be_written_to_is_named(monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code), "/dev/shm/pym-1-abc")

    monkeypatch.setattr(multiprocessing, "RawArray", refuse)
    said = rf"cannot create shared memory .* in /dev/shm: {os.strerror(code)}; .*env\.backend=sync"
    with pytest.raises(EnvironmentFailedError, match=said):
        build_env(settings("CartPole-v1", backend="async"), seed=0)


def family(tmp_path, **changes):
    return settings(FAMILY, backend="async", kwargs={"register": str(tmp_path / "pids")}, **changes)


def pids(tmp_path):
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def end_of(watched):
    for fd in watched:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(5000), "a child of an environment is still there"
        os.close(fd)


def test_what_an_environment_started_ends_with_it(tmp_path):
    zeros = np.zeros(1, np.int64)
    with build_env(family(tmp_path, max_restarts=1), seed=0) as env:
        env.reset()
        first = [os.pidfd_open(pid) for pid in pids(tmp_path)[-2:]]
        psutil.Process().children()[-1].kill()
        assert not env.step(zeros).valid.any()
        end_of(first)
        second = [os.pidfd_open(pid) for pid in pids(tmp_path)[-2:]]
    end_of(second)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("end", ["closed", "killed", "hangs"])
def test_daemons_of_an_environment_end_with_it(tmp_path, end):
    config = settings(
        "family_env:Daemons-v0", backend="async", kwargs={"register": str(tmp_path / "pids")},
        max_restarts=1, step_timeout=2.0 if end == "hangs" else 60.0,
    )  # fmt: skip
    with build_env(config, seed=0) as env:
        env.reset()
        probed, first = pids(tmp_path)[:2], [os.pidfd_open(pid) for pid in pids(tmp_path)[-2:]]
        assert not any(map(is_alive, probed)), "those of the process that was only asked"
        if end != "closed":
            if end == "killed":
                psutil.Process().children()[-1].kill()
            assert not env.step(np.full(1, end == "hangs", np.int64)).valid.any()
            end_of(first)
            first = [os.pidfd_open(pid) for pid in pids(tmp_path)[-2:]]
    end_of(first)


@pytest.mark.parametrize("at", [1, 7])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_building_many_stops_when_asked_to(tmp_path, at, number):
    def stop(*_):
        raise KeyboardInterrupt

    # A thread that has nothing blocked gets the signal while the main one holds it back.
    done = threading.Event()
    bystander = threading.Thread(target=done.wait)
    bystander.start()
    before, handler = psutil.Process().children(), signal.signal(number, stop)
    register = tmp_path / "built"
    kwargs = {"register": str(register), "at": at, "number": int(number)}
    config = settings("family_env:Calling-v0", backend="async", num_envs=500, kwargs=kwargs)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_env(config, seed=0)
    finally:
        signal.signal(number, handler)
        done.set()
        bystander.join()
    assert at <= register.stat().st_size < 400
    assert psutil.Process().children() == before
