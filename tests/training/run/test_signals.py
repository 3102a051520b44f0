"""Signals end a run with one line, their exit code and no traceback, at any time."""

import json
import re
import signal
import subprocess
import sys

import pytest
from command import QUICK, ROOT, environment
from command import run as run_afresh
from warm import run, start

from steadyrl.training.run.watcher_process import ORPHANED

NOTED = "stopping after this step; signal again to stop at once"
INT, TERM, HUP = int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGHUP)
USR2, XCPU = int(signal.SIGUSR2), int(signal.SIGXCPU)


def signalled(folder, signals, *overrides, code, run=run):
    """Train with an environment that sends these signals to its own process."""
    numbers = f"[{','.join(map(str, signals))}]"
    chosen = (
        "env.id=broken_envs:Signaller-v0",
        "env.backend=sync",
        f"env.kwargs.signals={numbers}",
    )
    return run(folder, *chosen, "total_steps=1e6", "eval.every=0", *overrides, code=code)


@pytest.mark.parametrize("number", [INT, TERM, HUP, USR2, XCPU])
def test_one_signal_finishes_the_step_and_saves(tmp_path, number):
    _, summary, printed = signalled(tmp_path, [number], "env.kwargs.step=300", code=128 + number)
    assert printed.count(NOTED) == 1
    assert summary["status"] == "interrupted" and summary["steps"] == 300
    assert len(summary["weights_sha256"]) == 64


@pytest.mark.parametrize(
    ("signals", "apart"),
    [([INT, TERM], 0), ([TERM, INT], 0), ([INT, INT], 0.2), ([TERM, TERM], 1.1)],
)
def test_a_second_signal_ends_the_run_at_once(tmp_path, signals, apart):
    chosen = ("env.kwargs.step=300", f"env.kwargs.apart={apart}")
    _, summary, printed = signalled(tmp_path, signals, *chosen, code=128 + signals[1])
    assert printed.count(NOTED) == 1
    assert summary["status"] == "interrupted" and summary["steps"] == 299
    # The first checkpoint may still be written.
    since = "299 steps since the checkpoint of step 0"
    assert re.search(f"^lost: ({since}|all 299 steps, no checkpoint was written)$", printed, re.M)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_signals_end_processes_that_an_environment_starts(tmp_path, backend):
    chosen = ("env.id=family_env:Ended-v0", "env.kwargs.register=ended", f"env.backend={backend}")
    run(tmp_path, *chosen, "eval.every=0", "total_steps=20")
    assert {*(tmp_path / "ended").read_text().split("\n")} == {f"{-TERM} {-INT}", ""}


def test_a_run_that_ends_at_once_says_what_it_loses_and_what_goes_on(tmp_path):
    chosen = ("env.id=broken_envs:Signaller-v0", "env.backend=sync", "eval.every=0")
    own = ("env.kwargs.step=300", f"env.kwargs.signals=[{INT},{TERM}]", "total_steps=200")
    directory, _, _ = run(tmp_path, *chosen, *own)
    longer = (f"resume={directory}", "total_steps=1e6", chosen[0])
    _, summary, printed = run(tmp_path, *longer, quick=False, code=128 + TERM)
    lost, go_on = printed[printed.index("lost: ") :].splitlines()[:2]
    assert lost == f"lost: {summary['steps'] - 200} steps since the checkpoint of step 200"
    assert go_on.startswith("resume: ") and f"resume={directory}" in go_on.replace("'", "")


@pytest.mark.parametrize("number", [TERM, HUP, USR2, XCPU])
def test_workers_that_get_the_signal_too_end_the_step_that_is_saved(tmp_path, number):
    """As from systemd and Slurm."""
    kwargs = f"++env.kwargs={{signals: [{number}], step: 300, upwards: true}}"
    chosen = ("env.id=broken_envs:Signaller-v0", kwargs, "env.backend=async", "env.max_restarts=0")
    more = ("total_steps=1e6", "eval.every=0")
    _, summary, printed = run(tmp_path, *chosen, *more, code=128 + number)
    assert printed.count(NOTED) == 1 and "lost" not in printed
    assert summary["status"] == "interrupted" and summary["steps"] == 300


def test_an_environment_that_handles_a_signal_itself_does_not_take_it_from_the_run(tmp_path):
    chosen = ("env.id=broken_envs:Taker-v0", "env.kwargs.step=310")
    _, summary, printed = signalled(tmp_path, [TERM], *chosen, code=128 + TERM)
    assert summary["status"] == "interrupted" and summary["steps"] == 310
    assert printed.count("SIGTERM was handled by other code (broken_envs)") == 1


def test_a_handler_that_an_environment_sets_in_a_step_is_replaced_without_a_reset(tmp_path):
    chosen = ("env.id=broken_envs:StepTaker-v0", "env.backend=sync", "total_steps=1e7")
    _, summary, printed = run(tmp_path, *chosen, "eval.every=0", "log.every=0", code=128 + TERM)
    assert summary["status"] == "interrupted"
    assert printed.count("SIGTERM was handled by other code (broken_envs)") == 1


def test_an_environment_that_uses_the_alarm_does_not_take_the_time_limit(tmp_path):
    chosen = ("env.id=broken_envs:AlarmTaker-v0", "env.backend=sync", "stop_timeout=0.1")
    _, summary, printed = run(tmp_path, *chosen, "eval.every=0", code=128 + TERM)
    assert "did not finish in time: stopping without saving it" in printed
    assert summary["status"] == "interrupted" and summary["steps"] == 299


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_to_a_worker_alone_have_no_effect(tmp_path, number):
    kwargs = f"++env.kwargs={{signals: [{int(number)}], step: 300}}"
    chosen = ("env.id=broken_envs:Signaller-v0", kwargs, "env.backend=async", "env.max_restarts=0")
    _, summary, _ = run(tmp_path, *chosen, "total_steps=400", "eval.every=0")
    assert summary["status"] == "finished"


@pytest.mark.parametrize("every", ["checkpoint.every=250", "checkpoint.every=0"])
def test_an_environment_that_fails_by_the_signal_too_is_named_with_what_is_lost(tmp_path, every):
    chosen = ("env.kwargs.step=300", "env.kwargs.fails=true", "env.max_restarts=0", every)
    never = "checkpoint.seconds=0"
    _, summary, printed = signalled(tmp_path, [TERM], *chosen, never, code=9)
    assert summary["status"] == "interrupted" and summary["steps"] == 299
    assert re.search("not saved: after the signal, .*the simulator has ended", printed)
    if every == "checkpoint.every=250":
        # 49 since that of step 250, unless the one of the start was still being written then.
        [(lost, since)] = re.findall(
            r"lost: (\d+) steps since the checkpoint of step (\d+)", printed
        )
        assert int(since) in (0, 250) and int(lost) + int(since) == 299
        assert printed.count("\nresume: ") == 1
    else:
        assert "lost: all 299 steps, no checkpoint was written" in printed


@pytest.mark.parametrize("resumed", [False, True])
def test_an_interrupted_run_without_checkpoints_says_what_is_lost(tmp_path, resumed):
    again: tuple[str, ...] = ()
    if resumed:
        first = signalled(tmp_path, [TERM], "env.kwargs.step=300", "total_steps=200", code=0)
        again = (f"resume={first[0]}",)
    chosen = ("env.kwargs.step=300", "checkpoint.every=0", "checkpoint.seconds=0", *again)
    _, summary, printed = signalled(tmp_path, [TERM], *chosen, code=9)
    assert summary["status"] == "interrupted"
    if resumed:
        assert f"lost: {summary['steps'] - 200} steps since the checkpoint of step 200" in printed
    else:
        assert "lost: all 300 steps, no checkpoint was written\n" in printed
    assert printed.count("\nresume: ") == resumed


def test_a_run_without_checkpoints_that_ends_at_once_loses_all(tmp_path):
    chosen = ("env.kwargs.step=300", "checkpoint.every=0", "checkpoint.seconds=0")
    _, _, printed = signalled(tmp_path, [INT, TERM], *chosen, code=128 + TERM)
    assert "lost: all 299 steps, no checkpoint was written\n" in printed
    assert "resume: " not in printed


@pytest.mark.parametrize(
    ("number", "apart"), [(INT, 0), (TERM, 0), (HUP, 0), (USR2, 0), (XCPU, 1.1)]
)
def test_a_signal_that_comes_twice_is_one(tmp_path, number, apart):
    """As `timeout` sends them, to the process and its group, and the kernel SIGXCPU."""
    chosen = ("env.kwargs.step=300", f"env.kwargs.apart={apart}")
    _, summary, printed = signalled(tmp_path, [number, number], *chosen, code=128 + number)
    assert printed.count(NOTED) == 1
    assert summary["status"] == "interrupted" and summary["steps"] == 300


@pytest.mark.parametrize(
    ("signals", "code"),
    [([USR2, ORPHANED], USR2), ([ORPHANED, USR2], TERM), ([ORPHANED, ORPHANED], TERM)],
)
def test_the_death_of_a_runs_parent_is_no_second_signal(tmp_path, signals, code):
    """A scheduler's signal ends a run's parent too, and the kernel tells the run of that."""
    chosen = ("env.kwargs.step=300", "env.kwargs.apart=1.1")
    _, summary, printed = signalled(tmp_path, signals, *chosen, code=128 + code)
    assert printed.count(NOTED) == 1
    assert summary["status"] == "interrupted" and summary["steps"] == 300


def test_after_the_death_of_its_parent_a_second_signal_ends_a_run_at_once(tmp_path):
    chosen = ("env.kwargs.step=300",)
    _, summary, _ = signalled(tmp_path, [ORPHANED, USR2, TERM], *chosen, code=128 + TERM)
    assert summary["status"] == "interrupted" and summary["steps"] == 299


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("number", [INT, TERM])
def test_one_signal_before_the_run_ends_the_command(tmp_path, number, fails):
    chosen = ("env.kwargs.made=true", f"env.kwargs.fails={fails}")
    directory, _, printed = signalled(tmp_path, [number], *chosen, code=128 + number)
    assert printed.splitlines()[-1] == "stopping"
    assert directory is None and list(tmp_path.iterdir()) == []


REPLACING = """
import os
from steadyrl.training.run.signals import ended_by_signals
with ended_by_signals():
    try:
        os.kill(os.getpid(), {number})
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None
"""


@pytest.mark.parametrize("number", [INT, TERM, USR2])
def test_a_library_that_replaces_the_interrupt_keeps_its_exit_code(tmp_path, number):
    """As Ray does."""
    command = [sys.executable, "-c", REPLACING.format(number=number)]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + number, "stopping\n")


CLEANING = """
import os, sys
from steadyrl.training.cli import main
def stopped(*_, **__):
    try:
        os.kill(os.getpid(), {number})
    finally:
        raise AttributeError("half done")
main.{where} = stopped
import steadyrl.loop
sys.argv = ["train.py"]
steadyrl.loop.command()
"""


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("where", ["read", "compose_one", "accept"])
def test_a_library_that_fails_after_the_signal_does_not_replace_it(tmp_path, where, number):
    """As argparse does, which takes back half of what it has changed."""
    command = [sys.executable, "-c", CLEANING.format(where=where, number=number)]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + number, "stopping\n")


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_signal_during_imports_ends_the_command(tmp_path, number):
    (tmp_path / "gymnasium.py").write_text(f"import os\nos.kill(os.getpid(), {number})\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py")],
        capture_output=True,
        text=True,
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "stopping\n")


# A compiler that sends Ctrl-C to its process group.
COMPILER = """#!/bin/sh
case "$*" in *--version*) exec g++ "$@";; esac
[ -e "$0.pressed" ] || { touch "$0.pressed"; kill -INT 0; }
exit 1
"""


@pytest.mark.long
@pytest.mark.machinery
def test_ctrl_c_during_compilation_ends_the_run(tmp_path):
    """Ctrl-C reaches the whole process group, the compiler too."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    # An empty cache.
    caches = ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
    env_ = dict.fromkeys(caches, str(tmp_path / "cache")) | {"CXX": str(compiler)}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *QUICK, "agent.compile=true", "total_steps=1e6"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment() | env_,
        start_new_session=True,
    )
    out, err = process.communicate()
    assert process.returncode == 130, out + err
    assert err.splitlines()[0] == NOTED and "Traceback" not in out + err
    assert "compiling the update" in out and "running eagerly" not in out
    [summary] = tmp_path.rglob("summary.json")
    result = json.loads(summary.read_text())
    assert result["status"] == "interrupted" and result["updates"] == 0
    [_, newest] = sorted(tmp_path.rglob("checkpoints/step-*"))
    assert newest.name == f"step-{result['steps']:012d}"


@pytest.mark.long
def test_nohup_keeps_a_run_alive(tmp_path):
    before = signal.signal(HUP, signal.SIG_IGN)  # inherited by children
    try:
        chosen = ("env.kwargs.step=300", "total_steps=400")
        _, summary, printed = signalled(tmp_path, [HUP], *chosen, code=0, run=run_afresh)
    finally:
        signal.signal(HUP, before)
    assert summary["status"] == "finished" and NOTED not in printed


SAVING = """
import os, signal, sys
from steadyrl.training.checkpoints import summary
from steadyrl.training.run.signals import ended_by_signals
whole = summary.write_atomic
def write(path, text):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)  # the same signal at once would be one request
    whole(path, text)
summary.write_atomic = write
import steadyrl.loop as train
sys.argv[0] = "train.py"
train.command()
"""


def test_signals_while_writing_the_summary_lose_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SAVING, *QUICK, "total_steps=300", "run_dir=here"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "here" / "summary.json").read_text())["status"] == "finished"


def test_a_closed_stdout_does_not_end_the_run(tmp_path):
    process = start(tmp_path, "run_dir=here", "log.every=20")
    process.stdout.readline()
    process.stdout.close()
    process.wait()
    err = process.stderr.read()
    assert process.returncode == 0, err
    assert err == ""
    assert json.loads((tmp_path / "here" / "summary.json").read_text())["status"] == "finished"
