import json
import re
import resource
import subprocess
import sys

import psutil
import pytest
import warm
from opened import job
from pages import mapped_by

from steadyrl.buffers.replay.host import HostReplay
from steadyrl.memory.process import MB, read_tree, readable
from steadyrl.training.setup import open_run

RUN_BYTES = 1_350_000_000  # bytes for a run, besides the mappings of torch


@pytest.fixture(scope="module")
def torch_mapped():
    """Return the address space that torch maps: a CUDA build maps gigabytes."""
    return mapped_by("torch")


@pytest.fixture(scope="module")
def limit(torch_mapped):
    """Return an address space limit for torch, whatever its build, and a small run."""
    return torch_mapped + RUN_BYTES


def limited(limit):
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def train(request, folder, *overrides, preexec=None):
    return subprocess.run(
        [sys.executable, str(request.config.rootpath / "train.py"), "device=cpu", *overrides],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        preexec_fn=preexec,
    )


def error_and_capacity(returncode, stderr):
    """Return the single error line of a rejected run, and the capacity it names."""
    assert returncode == 7, stderr
    assert "Traceback" not in stderr
    (error,) = (line for line in stderr.splitlines() if line.startswith("error:"))
    capacity = re.search(r"the largest capacity that fits is ([\d,]+)$", error)[1]
    return error, int(capacity.replace(",", ""))


@pytest.mark.long
def test_replay_beyond_the_address_space_is_rejected_in_one_line(request, tmp_path, limit):
    out = train(request, tmp_path, "agent.replay.capacity=1e9", preexec=limited(limit))
    error, capacity = error_and_capacity(out.returncode, out.stderr)
    assert f"address space limit {readable(limit)}" in error
    assert 10_000 < capacity < 1e9
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.parametrize(
    ("fraction", "more"),
    [
        pytest.param(0.5, 0, id="torch"),
        pytest.param(1, 40_000_000, id="numba", marks=pytest.mark.slow),
    ],
)
def test_running_out_of_memory_while_importing_is_one_line(
    request, tmp_path, torch_mapped, fraction, more
):
    tight = int(fraction * torch_mapped) + more
    out = train(request, tmp_path, preexec=limited(tight))
    assert out.returncode == 7, out.stderr
    (line,) = out.stderr.splitlines()
    assert line.startswith("error: memory ran out while the program was loaded"), line
    assert "ulimit -v" in line


def test_a_replay_beyond_the_machines_memory_is_rejected(request, tmp_path):
    process = warm.start(tmp_path, "device=cpu", "agent.replay.capacity=1e18", quick=False)
    _, err = process.communicate()
    error, fits = error_and_capacity(process.returncode, err)
    assert "replay needs" in error
    assert fits > 10_000


@pytest.mark.long
def test_an_atari_replay_beyond_the_limit_is_rejected(request, tmp_path, limit):
    pytest.importorskip("ale_py")
    overrides = ("env=atari", "agent.replay.capacity=1e6", "agent.replay.prioritized=false")
    out = train(request, tmp_path, *overrides, preexec=limited(limit))
    error, capacity = error_and_capacity(out.returncode, out.stderr)
    assert "replay needs 7.07 GB" in error and f"address space limit {readable(limit)}" in error
    assert 10_000 < capacity < limit / 84**2
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.slow
def test_the_named_capacity_fits(request, tmp_path, limit):
    pytest.importorskip("ale_py")
    atari = (
        "env=atari",
        "total_steps=600",
        "agent.compile=false",
        "agent.learning_starts=300",
        "agent.updates_per_train=2",
        "eval.every=600",
        "eval.max_episode_steps=20",
    )
    out = train(request, tmp_path, *atari, "agent.replay.capacity=1e6", preexec=limited(limit))
    _, capacity = error_and_capacity(out.returncode, out.stderr)
    chosen = f"agent.replay.capacity={capacity}"
    out = train(request, tmp_path, *atari, chosen, preexec=limited(limit))
    assert out.returncode == 0, out.stderr
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["updates"] > 0


def test_rollout_beyond_the_address_space_is_rejected_in_one_line(request, tmp_path, limit):
    huge = ("agent=ppo", "agent.rollout_steps=1e9", "total_steps=1e10")
    out = train(request, tmp_path, *huge, preexec=limited(limit))
    assert out.returncode == 7, out.stderr
    (error,) = (line for line in out.stderr.splitlines() if line.startswith("error:"))
    assert "rollout needs" in error and f"address space limit {readable(limit)}" in error
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.long
def test_a_limit_below_what_the_process_holds_is_refused_with_one_that_does(request, tmp_path):
    refused = train(request, tmp_path, "memory.limit_mb=10", "total_steps=2000")
    assert refused.returncode == 7, refused.stderr
    (error,) = (line for line in refused.stderr.splitlines() if line.startswith("error:"))
    assert "memory.limit_mb=10: the run's processes hold" in error
    assert "capacity" not in error and "num_envs" not in error
    assert not list(tmp_path.rglob("summary.json"))
    enough = re.search(r"set (memory\.limit_mb=\d+) or more$", error)[1]
    out = train(request, tmp_path, enough, "total_steps=2000")
    assert out.returncode == 0, out.stderr


def test_what_the_host_holds_of_a_run_is_what_its_limit_names(tmp_path, monkeypatch):
    monkeypatch.setattr(HostReplay, "host_nbytes", 7)
    with open_run(job(tmp_path, "eval.every=0", "env.backend=sync")) as (run, *_):
        assert run._services.watch._host_buffers["replay"] == 7


def test_the_plan_says_what_is_built_and_what_all_processes_hold(tmp_path, capsys):
    capacity = "agent.replay.capacity=1e6"  # some 50 MB, which the process holds from the start
    with open_run(job(tmp_path, capacity, "eval.every=0", "env.backend=sync")):
        held = read_tree(psutil.Process()).kept
    (plan,) = re.findall(r"^memory plan: (.*)$", capsys.readouterr().out, re.MULTILINE)
    found = re.fullmatch(
        r"replay (.*) MB, networks .* [KM]B, all processes (.*) ([MG])B, still available .*", plan
    )
    all_processes = float(found[2]) * {"M": 1, "G": 1000}[found[3]]
    assert float(found[1]) < all_processes == pytest.approx(held / MB, rel=0.1)
