"""Hostile environments: exits, crashes, threads and child processes do not harm the trainer."""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.connection
import os
import re
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

from steadyrl.envs.backends import subprocess as subprocess_backend
from steadyrl.envs.backends import worker_handle
from steadyrl.envs.factory import build_env
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.memory.process import usable_cores

HOSTILE = "env.id=hostile_envs:Hostile-v0"
# What torch makes tensors of, as the message names it.
TENSORS = {"dtype": "default dtype", "device": "default device", "inference": "inference mode"}
PROCESSES = ("os._exit", "segfault", "hang")


def hostile_env(where, harm, *more):
    return (HOSTILE, f"env.kwargs.where={where}", f"env.kwargs.harm={harm}", *more)


def error_line(folder, *overrides, code):
    directory, _, text = warm.run(folder, *overrides, "env.step_timeout=1", code=code)
    [line] = [
        line for line in text.splitlines() if not line.startswith("  ")
    ]  # stack frames are indented
    assert directory is None
    return line


@pytest.mark.long
@pytest.mark.parametrize("harm", ["SystemExit", *PROCESSES])
def test_a_crashing_constructor_in_a_worker_does_not_end_the_trainer(tmp_path, harm):
    text = error_line(tmp_path, *hostile_env("constructor", harm), "env.backend=async", code=4)
    assert "hostile_envs:Hostile-v0 cannot be built" in text


@pytest.mark.skipif(usable_cores() == 1, reason="auto uses no processes on one core")
@pytest.mark.parametrize("harm", PROCESSES)
def test_auto_probes_in_a_subprocess_when_async_is_possible(tmp_path, harm):
    many = ("env.backend=auto", "env.num_envs=2")
    assert "cannot be built" in error_line(
        tmp_path, *hostile_env("constructor", harm), *many, code=4
    )


def test_a_constructor_that_exits_is_reported_as_a_failure(tmp_path):
    text = error_line(tmp_path, *hostile_env("constructor", "SystemExit"), code=4)
    assert "hostile_envs:Hostile-v0 cannot be built: SystemExit: 0" in text


@pytest.mark.parametrize("where", ["constructor", "some steps"])
@pytest.mark.parametrize("harm", ["log config", "log off"])
def test_an_environment_that_configures_logging_leaves_the_runs_log(tmp_path, where, harm):
    sync = ("env.backend=sync", "total_steps=300", "run_name=logged")
    directory, _, text = warm.run(tmp_path, *hostile_env(where, harm), *sync)
    shown = (
        "DQN on hostile_envs:Hostile-v0: 300 steps",
        "evaluation at step 300",
        "finished after 300",
    )
    for line in shown:
        assert line in text
        assert line in (directory / "train.log").read_text()


IMPATIENT = """
import sys
import steadyrl.training.run.signals as signals
import steadyrl.loop
signals.THREAD_SECONDS = 0.5
sys.argv[0] = "train.py"
steadyrl.loop.command()
"""


@pytest.mark.long
@pytest.mark.parametrize(("harm", "code"), [("thread", 0), ("'thread, KeyError'", 4)])
def test_a_command_ends_although_an_environment_has_left_a_thread(tmp_path, harm, code):
    """The interpreter waits for it without end."""
    chosen = (*command.QUICK, *hostile_env("some steps", harm), "env.backend=sync")
    process = subprocess.run(
        [sys.executable, "-c", IMPATIENT, *chosen],
        capture_output=True, text=True, cwd=tmp_path, env=command.environment(),
    )  # fmt: skip
    assert process.returncode == code, process.stderr
    assert "waiting up to 0.5 s for what still runs: simulator" in process.stderr
    assert "exiting although it still runs: simulator" in process.stderr


def test_a_space_too_large_for_memory_ends_with_code_7(tmp_path):
    large = (HOSTILE, f"env.kwargs.states={2**50}", "env.backend=sync")
    directory, _, text = warm.run(tmp_path, *large, code=7)
    assert directory is None and "error: out of memory" in text and "PiB" in text


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_constructor_that_raises_is_an_invalid_setting(tmp_path, backend):
    raising = hostile_env("constructor", "KeyError", f"env.backend={backend}")
    text = error_line(tmp_path, *raising, code=2)
    assert "env.id=hostile_envs:Hostile-v0: cannot be built: KeyError: 'a level'" in text


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("where", "harm", "shown"),
    [
        ("reset", "SystemExit", "0"),
        ("step", "SystemExit", "0"),
        ("step", "os._exit", "os._exit(0) was called"),
    ],
)
def test_an_environment_that_exits_is_reported_as_a_failure(tmp_path, backend, where, harm, shown):
    exits = hostile_env(where, harm, "env.max_restarts=0", f"env.backend={backend}")
    _, summary, text = warm.run(tmp_path, *exits, code=4)
    assert f"environment 0 failed at step 0 of the run: SystemExit: {shown} (" in text
    assert re.search(rf"^  .*hostile_envs\.py:\d+ in <lambda>: \"{harm}\"", text, re.M)
    assert summary["status"] == "failed"


def test_a_worker_that_crashes_names_where_the_stack_can_be_had(tmp_path):
    crashes = hostile_env("step", "segfault", "env.max_restarts=0", "env.backend=async")
    _, _, text = warm.run(tmp_path, *crashes, code=4)
    assert "killed by SIGSEGV; env.backend=sync writes the stack to train.log" in text


@pytest.mark.parametrize(("harm", "code"), [("native exit", 0), ("segfault", -signal.SIGSEGV)])
def test_a_process_that_native_code_ends_within_a_step_says_so(tmp_path, harm, code):
    ends = hostile_env("step", f"'{harm}'", "env.backend=sync", "run_dir=run")
    process = warm.start(tmp_path, *ends)
    _, text = process.communicate()
    assert process.returncode == code
    assert "error: the process ended within a step of an environment" in text
    log = (tmp_path / "run" / "train.log").read_text()
    assert "error: the process ended within a step of an environment" in log
    assert ("hostile_envs.py" in log) == (harm == "segfault"), "the stack of a crash"


@pytest.mark.long
@pytest.mark.parametrize("harm", ["gradients", "matmul"])
@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
@pytest.mark.parametrize("agent", ["dqn agent.learning_starts=200", "ppo agent.rollout_steps=50"])
def test_environments_that_set_up_torch_do_not_affect_training(tmp_path, agent, where, harm):
    short = f"agent={agent} agent.compile=false total_steps=400 eval.every=150 device=cpu".split()
    hashes = set()
    for place in (where, "nowhere"):
        run = (*short, "env.backend=sync", *hostile_env(place, harm))
        _, summary, _ = warm.run(tmp_path, *run, quick=False)
        assert summary["updates"]
        hashes.add(summary["weights_sha256"])
    assert len(hashes) == 1


def test_environments_that_set_threads_do_not_affect_training(tmp_path):
    _, _, text = warm.run(
        tmp_path, *hostile_env("constructor", "threads"), "threads=1", "eval.every=0"
    )
    assert "seed 0, cpu, 1 thread\n" in text


@pytest.mark.parametrize("harm", TENSORS)
def test_changing_torchs_default_tensor_requires_async(tmp_path, harm):
    short = ("total_steps=300", "eval.every=0")
    directory, _, text = warm.run(tmp_path, *hostile_env("constructor", harm), *short, code=4)
    assert directory is None
    assert f"hostile_envs:Hostile-v0 has set torch's {TENSORS[harm]} to " in text
    _, summary, _ = warm.run(
        tmp_path, *hostile_env("constructor", harm, "env.backend=async"), *short
    )
    assert summary["status"] == "finished"


@pytest.mark.parametrize("harm", TENSORS)
@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("agent", ["dqn", "ppo"])
def test_changing_torchs_default_tensor_later_ends_the_run(tmp_path, where, harm, agent):
    short = (f"agent={agent}", "agent.compile=false", "total_steps=3000", "eval.every=0")
    _, _, text = warm.run(
        tmp_path, *hostile_env(where, harm, "env.backend=sync"), *short, code=4, quick=False
    )
    assert f"hostile_envs:Hostile-v0 has set torch's {TENSORS[harm]} to " in text


@pytest.mark.long
@pytest.mark.parametrize("harm", ["SystemExit", *PROCESSES])
def test_a_crashing_close_in_a_worker_does_not_harm_training(tmp_path, harm):
    short = ("total_steps=300", "eval.every=0", "env.backend=async")
    _, summary, _ = warm.run(tmp_path, *hostile_env("close", harm), *short)
    assert summary["status"] == "finished"


def test_async_runs_no_environment_code_in_the_trainer(tmp_path):
    traces = tmp_path / "traces"
    short = (HOSTILE, "env.backend=async", "total_steps=300", "eval.every=200")
    process = warm.Process(tmp_path, [*command.QUICK, *short], {"TRACES": str(traces)})
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    seen = set(traces.read_text().split())
    assert len(seen) >= 3  # of probing, training and evaluation
    assert str(process.pid) not in seen


def test_running_out_of_open_files_names_the_ulimit(tmp_path):
    script = 'ulimit -n 32; exec "$@" 2>&1'
    many = ("env.backend=async", "env.num_envs=30", "eval.every=0")
    text = output_of_shell(script, tmp_path, *many)
    assert "can have no process: Too many open files" in text
    assert "(ulimit -n) is 32" in text


def output_of_shell(script, folder, *overrides):
    train = [sys.executable, str(command.ROOT / "train.py"), *command.QUICK, *overrides]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *train],
        cwd=folder, env=command.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 4, done.stdout
    return done.stdout


def test_running_out_of_processes_names_the_ulimit(monkeypatch):
    def refuse():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(EnvironmentFailedError, match=r"can have no process: .*ulimit -u"):
        build_env(settings("CartPole-v1", backend="async"), seed=0)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_unwritable_shared_memory_is_named_with_a_workaround(monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code), "/dev/shm/pym-1-abc")

    monkeypatch.setattr(multiprocessing, "RawArray", refuse)
    expected = (
        rf"cannot create shared memory .* in /dev/shm: {os.strerror(code)}; .*env\.backend=sync"
    )
    with pytest.raises(EnvironmentFailedError, match=expected):
        build_env(settings("CartPole-v1", backend="async"), seed=0)


def family_env(tmp_path, **changes):
    return settings(FAMILY, backend="async", kwargs={"register": str(tmp_path / "pids")}, **changes)


def pids(tmp_path):
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def assert_ended(watched):
    for fd in watched:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(5000), "a child of an environment is still there"
        os.close(fd)


@pytest.fixture
def short_grace(monkeypatch):
    """Give workers that do not end by themselves less time to do so."""
    for module in (subprocess_backend, worker_handle):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)


def test_child_processes_of_an_environment_end_with_it(tmp_path, short_grace):
    zeros = np.zeros(1, np.int64)
    with build_env(family_env(tmp_path, max_restarts=1), seed=0) as env:
        env.reset()
        first = [os.pidfd_open(pid) for pid in pids(tmp_path)[-2:]]
        psutil.Process().children()[-1].kill()
        assert not env.step(zeros).valid.any()
        assert_ended(first)
        second = [os.pidfd_open(pid) for pid in pids(tmp_path)[-2:]]
    assert_ended(second)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("end", ["closed", "killed", "hangs"])
def test_daemons_of_an_environment_end_with_it(tmp_path, monkeypatch, caplog, end):
    """A worker's end is not waited for by the pipe that its daemons inherited and hold open."""

    def wait(*_):
        pytest.fail("waits for a pipe, not for a process")

    monkeypatch.setattr(multiprocessing.connection, "wait", wait)
    config = settings(
        "family_env:Daemons-v0", backend="async", kwargs={"register": str(tmp_path / "pids")},
        max_restarts=1, step_timeout=2.0 if end == "hangs" else 60.0,
    )  # fmt: skip
    with build_env(config, seed=0) as env:
        env.reset()
        probed, first = pids(tmp_path)[:2], [os.pidfd_open(pid) for pid in pids(tmp_path)[-2:]]
        assert not any(map(is_alive, probed)), "daemons of the probed environment must have ended"
        if end != "closed":
            if end == "killed":
                psutil.Process().children()[-1].kill()
            assert not env.step(np.full(1, end == "hangs", np.int64)).valid.any()
            reasons = {
                "killed": "killed by SIGKILL",
                "hangs": "no answer within env.step_timeout=2 s",
            }
            assert reasons[end] in caplog.text
            assert_ended(first)
            first = [os.pidfd_open(pid) for pid in pids(tmp_path)[-2:]]
    assert_ended(first)


@pytest.mark.parametrize("at", [1, 7])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_building_many_environments_stops_on_a_signal(tmp_path, at, number):
    def stop(*_):
        raise KeyboardInterrupt

    # A thread without blocked signals receives the signal while the main thread blocks it.
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


def test_workers_of_training_and_evaluation_have_names_of_their_own():
    """Messages about memory name the process that grew, and count all of them."""
    chosen = settings(backend="async", num_envs=2)
    with (
        build_env(chosen, seed=0) as training,
        build_env(chosen.for_evaluation(), seed=1) as played,
    ):
        training.reset()
        played.reset()
        names = sorted(child.name for child in multiprocessing.active_children())
    assert names == [
        "environment-0",
        "environment-0 (evaluation's)",
        "environment-1",
        "environment-1 (evaluation's)",
    ]
