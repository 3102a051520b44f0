import json
import re
import resource
import subprocess
import sys

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


def test_a_replay_beyond_the_address_space_is_refused_in_one_line(request, tmp_path):
    out = train(request, tmp_path, "agent.replay.capacity=1e9", preexec=limited)
    assert out.returncode == 7, out.stderr
    (error,) = (line for line in out.stderr.splitlines() if line.startswith("error:"))
    assert "address space limit 2.00 GB" in error
    capacity = int(re.search(r"largest capacity that fits is ([\d,]+)", error)[1].replace(",", ""))
    assert 10_000 < capacity < 1e9
    assert "Traceback" not in out.stderr
    assert not list(tmp_path.rglob("summary.json"))


def test_a_run_that_reaches_its_limit_ends_with_a_summary(request, tmp_path):
    out = train(request, tmp_path, "memory.limit_mb=150", "total_steps=20000")
    assert out.returncode == 7, out.stderr
    assert "memory.limit_mb=150 is reached" in out.stderr
    (summary,) = tmp_path.rglob("summary.json")
    found = json.loads(summary.read_text())
    assert found["steps"] < 20_000 and found["rss_mb_peak"] > 150
