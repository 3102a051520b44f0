import json
import re
import resource
import subprocess
import sys

import pytest
import warm

LIMIT = 2_000_000_000


def limited():
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))


def train(request, folder, *overrides, preexec=None):
    return subprocess.run(
        [sys.executable, str(request.config.rootpath / "train.py"), "device=cpu", *overrides],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        preexec_fn=preexec,
    )


def refused(returncode, stderr):
    """Return the one line that a run was refused with, and the capacity it names."""
    assert returncode == 7, stderr
    assert "Traceback" not in stderr
    (error,) = (line for line in stderr.splitlines() if line.startswith("error:"))
    capacity = re.search(r"the largest capacity that fits is ([\d,]+)$", error)[1]
    return error, int(capacity.replace(",", ""))


def test_a_replay_beyond_the_address_space_is_refused_in_one_line(request, tmp_path):
    out = train(request, tmp_path, "agent.replay.capacity=1e9", preexec=limited)
    error, capacity = refused(out.returncode, out.stderr)
    assert "address space limit 2.00 GB" in error
    assert 10_000 < capacity < 1e9
    assert not list(tmp_path.rglob("summary.json"))


def test_a_replay_beyond_all_memory_is_refused_likewise(request, tmp_path):
    process = warm.start(tmp_path, "device=cpu", "agent.replay.capacity=1e18", quick=False)
    _, err = process.communicate()
    error, fits = refused(process.returncode, err)
    assert "replay needs" in error
    assert fits > 10_000


def test_a_million_atari_frames_are_refused_in_two_gigabytes(request, tmp_path):
    pytest.importorskip("ale_py")
    asked = ("env=atari", "agent.replay.capacity=1e6", "agent.replay.prioritized=false")
    out = train(request, tmp_path, *asked, preexec=limited)
    error, capacity = refused(out.returncode, out.stderr)
    assert "replay needs 7.07 GB" in error and "address space limit 2.00 GB" in error
    assert 10_000 < capacity < LIMIT / 84**2
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.slow
def test_the_capacity_that_is_said_to_fit_does(request, tmp_path):
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
    out = train(request, tmp_path, *atari, "agent.replay.capacity=1e6", preexec=limited)
    _, capacity = refused(out.returncode, out.stderr)
    chosen = f"agent.replay.capacity={capacity}"
    out = train(request, tmp_path, *atari, chosen, preexec=limited)
    assert out.returncode == 0, out.stderr
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["updates"] > 0


def test_a_rollout_beyond_the_address_space_is_refused_in_one_line(request, tmp_path):
    huge = ("agent=ppo", "agent.rollout_steps=1e9", "total_steps=1e10")
    out = train(request, tmp_path, *huge, preexec=limited)
    assert out.returncode == 7, out.stderr
    (error,) = (line for line in out.stderr.splitlines() if line.startswith("error:"))
    assert "rollout needs" in error and "address space limit 2.00 GB" in error
    assert not list(tmp_path.rglob("summary.json"))


def test_a_run_that_reaches_its_limit_ends_with_a_summary(request, tmp_path):
    out = train(request, tmp_path, "memory.limit_mb=150", "total_steps=20000")
    assert out.returncode == 7, out.stderr
    assert "memory.limit_mb=150 is reached" in out.stderr
    (summary,) = tmp_path.rglob("summary.json")
    found = json.loads(summary.read_text())
    assert found["steps"] < 20_000 and found["rss_mb_peak"] > 150
