import gc
import json
import os
import subprocess
import sys

import psutil
import pytest

pytest.importorskip("matplotlib")

from matplotlib import pyplot
from matplotlib.figure import Figure
from soaked import LIMITS, MB, steady, with_samples

from scripts import soak as command
from scripts.soak import write_report
from scripts.soaking import sampling
from scripts.soaking.sampling import MetricsTail, take_sample
from scripts.soaking.verdict import judge


def test_the_report_is_complete_and_leaves_no_open_figures(tmp_path):
    def figures():
        gc.collect()
        return [item for item in gc.get_objects() if issubclass(type(item), Figure)]

    bad = with_samples(lambda s: s._replace(own=s.own + 2 * s.step))
    results = [(run, judge(run, LIMITS)) for run in (steady(), bad, steady(samples=[], logged=[]))]
    before = figures()
    write_report(results, tmp_path / "page.md")
    # Figures of other tests may be collected meanwhile.
    assert all(any(one is other for other in before) for one in figures())
    assert pyplot.get_fignums() == []
    page = (tmp_path / "page.md").read_text()
    assert "dqn on cartpole: steady" in page and "dqn on cartpole: NOT steady" in page
    assert "| Σ PSS without mapped files, MB per million steps | +2.00 | ≤ 1 | ✗ |" in page
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG") and "page.png" in page


def test_a_metrics_file_is_read_while_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    tail.read()
    assert tail.step == 0
    with path.open("w") as file:
        file.write('{"step": 100}\n{"step": 2')
        file.flush()
        tail.read()
        assert tail.step == 100
        file.write('00}\n')  # fmt: skip
        file.flush()
        tail.read()
    assert tail.lines == [{"step": 100}, {"step": 200}]


def test_a_sample_sums_the_process_tree_and_is_none_after_its_end():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        watched = psutil.Process(process.pid)
        while not watched.children():
            os.sched_yield()
        sample = take_sample(watched, 1.0, 5)
        process.communicate(b"\n")
    assert sample.children == 1 and sample.threads == 2 and sample.pss > sample.own > 5 * MB
    assert (sample.seconds, sample.step) == (1.0, 5) and sample.open_files >= 6
    assert take_sample(watched, 2.0, 6) is None


TRAINER = """
import hashlib, json, pathlib, sys
options = dict(word.split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(options["run_dir"])
folder.mkdir(parents=True)
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, 41):
        hashlib.pbkdf2_hmac("sha256", b"takes", b"a while", 40_000)
        line = {"step": step, "time/steps_per_second": 50.0, "eval/return_mean": 1.0}
        print(json.dumps(line), file=file, flush=True)
sys.exit(int(options.get("fail", 0)))
"""


@pytest.mark.long
@pytest.mark.parametrize("fail", [0, 5])
def test_the_command_runs_samples_and_reports(tmp_path, monkeypatch, capsys, fail):
    (tmp_path / "train.py").write_text(TRAINER)
    monkeypatch.setattr(sampling, "ROOT", tmp_path)
    code = command.main(
        f"--steps 1e3 --agents dqn ppo --every-seconds 0.01 --set fail={fail} "
        f"--max-slope-mb 1e9 --max-speed-change 1 "
        f"--runs {tmp_path / 'runs'} --report {tmp_path / 'page.md'}".split()
    )
    assert code == (1 if fail else 0)
    page = (tmp_path / "page.md").read_text()
    assert "agent=dqn env=cartpole total_steps=1000 eval.every=20" in page
    assert "ppo on cartpole" in page
    out = capsys.readouterr().out
    assert ("FAIL dqn on cartpole: exit code 5" in out) == bool(fail)
    assert len((tmp_path / "runs/dqn-cartpole/metrics.jsonl").read_text().splitlines()) == 40


def test_cpu_time_includes_ended_children():
    burn = "import time\nwhile time.process_time() < 0.35: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        watched = psutil.Process(process.pid)
        while not watched.children():
            os.sched_yield()
        while watched.children():
            os.sched_yield()
        sample = take_sample(watched, 1.0, 5)
        process.communicate(b"\n")
    # The kernel counts user and system time in ticks of 10 ms.
    assert sample.children == 0 and sample.cpu_seconds >= 0.3


# A run of a few seconds with many events.
QUICK = (
    "device=cpu",
    "agent.hidden=[16]",
    "agent.compile=false",
    "agent.replay.capacity=500",
    "agent.learning_starts=100",
    "agent.updates_per_train=4",
    "eval.every=1000",
    "eval.episodes=2",
    "log.every=100",
    # A checkpoint being written to a slow disk would count as an open file at some lines.
    "checkpoint.seconds=0",
    # Measure at every line.
    "memory.monitor.every_seconds=0",
    "memory.monitor.tree_every_seconds=0",
    "memory.monitor.tensors_every_seconds=1000",
)


@pytest.mark.long
def test_replaced_workers_leave_no_files_or_processes(tmp_path):
    args = command.parse(["--steps", "2000", "--crash-every", "150", "--set", *QUICK])
    overrides = command.overrides("dqn", "cartpole", args)
    found = sampling.soak("dqn", overrides, tmp_path / "run", every_seconds=0.2)
    assert found.exit_code == 0
    assert found.restarts >= 10
    # The first line was measured before the log files were open.
    for tag, least in (("memory/open_files", 10), ("memory/children", 3)):
        seen = {line[tag] for line in found.logged[1:]}
        assert len(seen) == 1 and seen.pop() >= least, tag
    assert max(sample.children for sample in found.samples) >= 3


@pytest.mark.slow
def test_memory_is_flat_with_replaced_workers(tmp_path):
    more = ["agent.replay.capacity=5000", "log.every=500"]
    args = command.parse(["--steps", "40000", "--crash-every", "1000", "--set", *QUICK, *more])
    overrides = command.overrides("dqn", "cartpole", args)
    found = sampling.soak("dqn", overrides, tmp_path / "run", every_seconds=0.2)
    loose = LIMITS._replace(restarts=30, slope_mb=1e9, growth_mb=20, speed_change=1e9)
    # Workers forked later inherit more open files; here some are never replaced.
    bad = {check.name for check in judge(found, loose) if not check.passed} - {"open files"}
    assert not bad


@pytest.mark.slow
def test_a_short_real_soak_passes(tmp_path):
    args = command.parse(["--steps", "20000", "--set", "device=cpu", "agent.replay.capacity=2000"])
    overrides = command.overrides("dqn", "cartpole", args)
    found = sampling.soak("dqn", overrides, tmp_path / "run", every_seconds=0.2)
    assert found.exit_code == 0 and found.restarts == 0
    loose = LIMITS._replace(slope_mb=1e9, growth_mb=50, speed_change=1e9)
    assert [check.name for check in judge(found, loose) if not check.passed] == []
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"
