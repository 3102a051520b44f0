"""However a rank ends, all ranks end soon and report the reason, and the run can be resumed."""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from forked_ranks import start

from steadyrl.core.files import Files
from steadyrl.training.checkpoints.store import Checkpoints
from steadyrl.training.distributed import heartbeat
from steadyrl.training.distributed.heartbeat import Heartbeat
from steadyrl.training.distributed.saver import RankCheckpoints, RankSaver
from steadyrl.training.run.finalize import _finish_mirror

SHORT = (
    "eval.every=0", "total_steps=1200", "agent.updates_per_train=1", "checkpoint.every=200",
    "run_dir=run",
)  # fmt: skip
ENDLESS = (*SHORT, "total_steps=1e8")


def test_living_processes_are_known_without_proc(monkeypatch):
    def no_file(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(heartbeat, "open", no_file, raising=False)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert heartbeat._is_running(os.getpid()) and heartbeat._is_running(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not heartbeat._is_running(child.pid), "a zombie"
    child.communicate()
    assert not heartbeat._is_running(child.pid)


def ended(ranks):
    """Return exit codes and outputs of ranks that end by themselves."""
    outputs = [rank.communicate() for rank in ranks]
    return [rank.returncode for rank in ranks], outputs


def own_lines(outputs):
    """Return the lines of stdout and stderr but Gloo's, which some versions of torch print."""
    lines = "".join(outputs).splitlines()
    return [line for line in lines if not line.startswith("[Gloo] Rank ")]


def summary(folder):
    return json.loads((folder / "run" / "summary.json").read_text())


def wait_for_checkpoint(folder, ranks):
    while not any((folder / "run" / "checkpoints").glob("step-*0000*")):
        assert not any(rank.is_over(0.02) for rank in ranks)


@pytest.mark.long
def test_a_killed_rank_ends_all_and_the_run_resumes_bitwise(tmp_path):
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted.mkdir()
    killed.mkdir()
    codes, outputs = ended(start(uninterrupted, 2, *SHORT))
    assert codes == [0, 0], outputs
    assert own_lines(outputs[1]) == [], "only rank 0 prints"

    ranks = start(killed, 2, *SHORT)
    wait_for_checkpoint(killed, ranks)
    os.kill(ranks[1].pid, signal.SIGKILL)
    begin = time.monotonic()
    codes, outputs = ended(ranks)
    assert time.monotonic() - begin < 10
    assert codes == [8, -signal.SIGKILL], outputs
    assert "error: rank 1 is lost: process" in outputs[0][1]
    assert "Traceback" not in outputs[0][1]

    codes, outputs = ended(start(killed, 2, *SHORT, "resume=auto"))
    assert codes == [0, 0], outputs
    assert "resumed from step" in outputs[0][0]
    one, other = summary(uninterrupted), summary(killed)
    for key in ("weights_sha256", "steps", "updates", "episodes", "return_mean"):
        assert one[key] == other[key], key


def test_a_signal_to_all_ranks_gives_one_checkpoint_of_the_last_step(tmp_path):
    ranks = start(tmp_path, 2, *ENDLESS, "checkpoint.every=0")
    wait_for_checkpoint(tmp_path, ranks)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGTERM)
    codes, outputs = ended(ranks)
    assert codes == [128 + signal.SIGTERM] * 2, outputs
    found = summary(tmp_path)
    assert found["status"] == "interrupted"
    (last,) = (tmp_path / "run" / "checkpoints").glob(f"step-{found['steps']:012d}")
    names = set(json.loads((last / "manifest.json").read_text())["files"])
    for name in ("agent", "env", "run", "replay"):
        assert {f"{name}.json", f"rank0001-{name}.json"} <= names


@pytest.mark.parametrize(
    ("error", "single", "seconds"),
    [
        (None, False, 60.0),
        (RuntimeError, True, 60.0),
        (RuntimeError, False, 20.0),
        (KeyboardInterrupt, False, 0.0),
    ],
)
def test_a_rank_that_fails_reports_that_before_it_is_ended(error, single, seconds):
    """Not at the end of the time that a finished run waits for its mirror."""
    waited: list[float] = []
    services = SimpleNamespace(
        comm=SimpleNamespace(is_single=single),
        mirror=SimpleNamespace(complete=None, finish=waited.append),
        signals=SimpleNamespace(),
    )
    with contextlib.suppress(error or RuntimeError):
        try:
            if error:
                raise error
        finally:
            _finish_mirror(SimpleNamespace(summary=SimpleNamespace()), services)
    assert waited == [seconds]
    assert error is None or single or seconds < heartbeat.REPORTING


def test_a_rank_that_fails_after_the_signal_ends_all(tmp_path):
    fails = ("env.id=faulty_env:Faulty-v0", "env.backend=sync", "env.kwargs.fault=memory")
    codes, outputs = ended(start(tmp_path, 2, *ENDLESS, *fails, "checkpoint.every=0"))
    assert codes == [8, 7], outputs
    assert "no memory for the state" in outputs[1][1]
    assert "not saved: after the signal, " in "".join(outputs[0])
    assert summary(tmp_path)["status"] == "interrupted"
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == 0


def test_ranks_with_different_configurations_are_rejected(tmp_path):
    ranks = start(tmp_path, 2, *SHORT, different=("agent.gamma=0.5",))
    codes, outputs = ended(ranks)
    assert codes == [2, 2]
    errors = "".join(err for _, err in outputs)
    assert errors.count("error: ") == 1
    assert (
        "agent.gamma=0.99: on rank 0, but 0.5 on rank 1: start all ranks with the same command"
        in errors
    )
    assert not (tmp_path / "run").exists()


def test_a_sweep_of_ranks_is_rejected(tmp_path):
    codes, outputs = ended(start(tmp_path, 2, "-m", "seed=1,2"))
    assert codes == [2, 2]
    assert "--multirun and torchrun cannot be combined" in outputs[0][1]


def test_a_run_too_short_for_a_rollout_of_all_ranks_is_rejected(tmp_path):
    rollout = ("agent.rollout_steps=100", "agent.minibatches=1", "env.num_envs=1")
    codes, outputs = ended(
        start(tmp_path, 2, "agent=ppo", *rollout, "total_steps=198", quick=False)
    )
    assert codes == [2, 2]
    reason = (
        "total_steps=198: gives each of 2 ranks 99, which is shorter than one rollout of 100 steps"
    )
    assert reason in outputs[0][1]


@pytest.mark.long
@pytest.mark.parametrize("old", [1, 2])
def test_another_number_of_ranks_reshards_the_state(tmp_path, old):
    codes, outputs = ended(start(tmp_path, old, *SHORT))
    assert codes == [0] * old, outputs
    before = summary(tmp_path)
    new = 3 - old
    again = (*SHORT, "resume=run", "total_steps=1400")
    codes, outputs = ended(start(tmp_path, new, *again))
    assert codes == [0] * new, outputs
    assert f"(saved on {old})" in outputs[0][0]
    after = summary(tmp_path)
    assert after["resumed_from_step"] == before["steps"]
    assert after["steps"] >= 1400
    # Learning continues at once, from the redistributed replay.
    assert after["updates"] - before["updates"] >= 20


def heartbeat_of(env_responses, timeouts, step_timeout=60.0, others=()):
    """Return the heartbeat of rank 0, whose thread has ended, with the peers `others`."""
    store = SimpleNamespace(check=lambda keys: False, set=lambda key, value: None)
    peers = [(socket.gethostname(), os.getpid()), *others]
    heartbeat = Heartbeat(store, 0, peers, step_timeout)
    heartbeat.close()
    heartbeat.watch_envs(lambda: env_responses[0], timeouts)
    heartbeat.beat()
    return heartbeat


@pytest.mark.parametrize(("timeouts", "late"), [(1, 61.0), (64, 64 * 60.0 + 1)])
def test_the_step_timeout_is_per_environment(monkeypatch, timeouts, late):
    now, env_responses = [1000.0], [0]
    heartbeat = heartbeat_of(env_responses, timeouts)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    heartbeat.beat()
    for _ in range(64):  # environments, one after the other in one timestep
        now[0] += 59.0
        env_responses[0] += 1
        heartbeat.poll_envs()
        assert heartbeat._find_timeout(0.0) is None
    now[0] += late
    heartbeat.poll_envs()
    lost = heartbeat._find_timeout(0.0)
    times = "" if timeouts == 1 else "64 times "
    assert f"took longer than {times}env.step_timeout=60 seconds; an environment" in lost.reason


def test_ranks_that_were_stopped_together_go_on(monkeypatch):
    """As by `docker pause`, or by Slurm for another job: no rank is to blame for that time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    heartbeat = heartbeat_of([0], timeouts=1)
    for seconds, stopped in ((0.6, False), (300.0, True), (0.6, False)):
        now[0] += seconds
        assert heartbeat._was_stopped() is stopped
        assert heartbeat._find_timeout(0.0) is None
    for _ in range(120):
        now[0] += 0.6
        assert not heartbeat._was_stopped()
    assert "an environment hangs" in heartbeat._find_timeout(0.0).reason


def test_a_silent_rank_that_executes_is_in_native_code_and_one_that_is_stopped_is_lost():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = heartbeat_of([0], timeouts=2, others=[(socket.gethostname(), child.pid)])
    elsewhere = heartbeat_of([0], timeouts=2, others=[("another-machine", child.pid)])
    assert here._find_timeout(119.0) is None
    assert here._find_timeout(121.0).reason == "no sign of life for 121 s"
    assert elsewhere._find_timeout(6.0).rank == 1
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert here._find_timeout(6.0).reason == "no sign of life for 6 s"
    child.kill()
    child.communicate()
    assert here._find_timeout(6.0).rank == 1


@pytest.mark.long
def test_an_environment_that_holds_the_gil_ends_no_rank(tmp_path):
    holds = ("env.id=faulty_env:Faulty-v0", "env.backend=sync", "env.kwargs.fault=gil")
    codes, outputs = ended(start(tmp_path, 2, *SHORT, *holds))
    assert codes == [0, 0], outputs


def test_a_slow_disk_is_no_hanging_environment():
    heartbeat, seen = heartbeat_of([0], timeouts=1), []
    saver = object.__new__(RankSaver)
    saver._ranks = SimpleNamespace(long_operation=heartbeat.suspended)
    waits = SimpleNamespace(wait_for_overwrite=lambda: seen.append(heartbeat._suspensions))
    saver._replay, saver.checkpoints = waits, SimpleNamespace(busy=True)
    saver._wait_for_overwrite()
    assert seen == [1]


def test_a_disk_that_does_not_answer_while_a_name_is_chosen_ends_no_run(tmp_path, monkeypatch):
    def stale(self, step):
        raise OSError(errno.ESTALE, "Stale file handle")

    ranks = SimpleNamespace(rank=0, size=1, all_gather=lambda value: [value])
    checkpoints = RankCheckpoints(tmp_path, ranks, keep=2, files=Files())
    monkeypatch.setattr(Checkpoints, "_free_name", stale)
    checkpoints.save(1, [], {})
    checkpoints.wait()
    assert "Stale file handle" in checkpoints.failure
    monkeypatch.undo()
    checkpoints.save(1, [], {})
    checkpoints.wait()
    assert checkpoints.failure is None and checkpoints.last is not None


@pytest.mark.slow
def test_many_slow_environments_do_not_count_as_hanging(tmp_path):
    slow = ("env.id=slow_env:Slow-v0", "env.kwargs.file=steps", "env.kwargs.seconds=0.8")
    envs_ = ("env.num_envs=6", "total_steps=24", "env.step_timeout=2", "env.backend=sync")
    codes, outputs = ended(start(tmp_path, 2, "run_dir=run", "eval.every=0", *slow, *envs_))
    assert codes == [0, 0], outputs


@pytest.mark.slow
def test_a_hanging_process_of_a_rank_is_replaced(tmp_path):
    slow = ("env.id=slow_env:Slow-v0", "env.kwargs.file=steps", "env.kwargs.seconds=1000")
    hangs = ("env.kwargs.after=100", "total_steps=300", "env.step_timeout=2", "env.backend=async")
    codes, outputs = ended(start(tmp_path, 2, "run_dir=run", "eval.every=0", *slow, *hangs))
    assert codes == [0, 0], outputs
    place = r"no answer within env\.step_timeout=2 s \(\S*slow_env\.py:\d+\); rebuilding it"
    assert re.search(place, outputs[0][0]), outputs


@pytest.mark.slow
def test_a_slow_step_of_ranks_is_saved_on_a_signal(tmp_path):
    slow = ("env.id=slow_env:Slow-v0", "env.kwargs.file=steps", "env.kwargs.seconds=2.5")
    envs_ = ("env.num_envs=9", "total_steps=1e6", "env.backend=sync")  # longer than 20 seconds
    ranks = start(tmp_path, 2, "run_dir=run", "eval.every=0", *slow, *envs_)
    step_file = tmp_path / "steps"
    while not step_file.exists() or len(step_file.read_text().split()) < 20:
        assert not any(rank.is_over(0.02) for rank in ranks)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGTERM)
    codes, outputs = ended(ranks)
    assert codes == [143, 143], outputs
    assert summary(tmp_path)["status"] == "interrupted" and summary(tmp_path)["steps"] > 0
