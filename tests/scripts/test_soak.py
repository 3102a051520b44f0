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

from scripts import soak as command
from scripts.soaking import sampling
from scripts.soaking.report import write_report
from scripts.soaking.sampling import MetricsTail, Sample, Soak, take_sample
from scripts.soaking.verdict import Limits, judge, own_slope, speed_change

LIMITS = Limits(slope_mb=1.0, speed_change=0.05, warmup=0.2, shared_machine=False)
MB = 1_000_000


def steady(**changes):
    """Return a run of a million steps that nobody can complain about."""
    plain = {
        "title": "dqn on cartpole",
        "command": ["train.py", "agent=dqn"],
        "exit_code": 0,
        "samples": [
            Sample(t, 10_000 * t, 600 * MB, 500 * MB + t % 3, 9.0 * t, 20, 4, 2) for t in range(101)
        ],
        "logged": [
            {"step": 10_000 * t, "time/steps_per_second": 1000 + t % 7, "memory/live_tensors": 50}
            for t in range(1, 101)
        ],
    }
    return Soak(**(plain | changes))


def failed(soak):
    return [check.name for check in judge(soak, LIMITS) if not check.passed]


def with_samples(change):
    return steady(samples=[change(sample) for sample in steady().samples])


def test_a_steady_run_passes_every_check():
    checks = judge(steady(), LIMITS)
    assert len(checks) == 6 and all(check.passed for check in checks)


def test_growth_is_found_and_only_after_the_warm_up():
    grows = with_samples(lambda s: s._replace(own=s.own + 2 * s.step))
    assert failed(grows) == ["Σ PSS without mapped files, MB per million steps"]
    assert own_slope(grows.samples) == pytest.approx(2.0, abs=0.01)
    fills = with_samples(lambda s: s._replace(own=min(s.step, 200_000) * 1000))
    assert failed(fills) == []


@pytest.mark.parametrize("field", ["open_files", "threads", "children"])
def test_handles_that_become_more_are_found(field):
    grown = with_samples(lambda s: s._replace(**{field: 4 + s.step // 100_000}))
    assert failed(grown) == [field.replace("_", " ")]


def test_a_run_that_slows_down_is_found():
    slower = [
        {"step": s, "time/steps_per_second": 1000 - s / 10_000}
        for s in range(10_000, 1_010_000, 10_000)
    ]
    assert speed_change(slower, 0.2) == pytest.approx(-0.077, abs=0.005)
    assert failed(steady(logged=slower)) == ["steps/s, last tenth against first"]


def test_on_a_shared_machine_speed_is_counted_in_cpu_seconds():
    limits = LIMITS._replace(shared_machine=True)
    waits = steady(
        logged=[{"step": 10_000 * t, "time/steps_per_second": 1 / t} for t in range(1, 101)]
    )
    assert all(check.passed for check in judge(waits, limits))
    works = with_samples(lambda s: s._replace(cpu_seconds=s.cpu_seconds**1.3))
    (bad,) = (check for check in judge(works, limits) if not check.passed)
    assert bad.name.startswith("steps per CPU second") and float(bad.value.rstrip("%")) < -20


def test_a_run_that_fails_or_was_hardly_seen_is_not_steady():
    assert failed(steady(exit_code=7)) == ["exit code"]
    assert failed(steady(samples=steady().samples[:5])) == ["samples after the warm-up"]
    assert failed(steady(logged=[], samples=[], exit_code=1)) == [
        "exit code",
        "samples after the warm-up",
    ]


def test_the_report_shows_everything_and_leaves_no_figure_open(tmp_path):
    def figures():
        gc.collect()
        return sum(issubclass(type(item), Figure) for item in gc.get_objects())

    bad = with_samples(lambda s: s._replace(own=s.own + 2 * s.step))
    results = [(run, judge(run, LIMITS)) for run in (steady(), bad, steady(samples=[], logged=[]))]
    before = figures()
    for _ in range(3):
        write_report(results, tmp_path / "page.md")
    assert figures() == before and pyplot.get_fignums() == []
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


def test_a_sample_sums_over_the_tree_and_survives_its_end():
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
        print(json.dumps({"step": step, "time/steps_per_second": 50.0}), file=file, flush=True)
sys.exit(int(options.get("fail", 0)))
"""


@pytest.mark.parametrize("fail", [0, 5])
def test_the_command_runs_samples_reports_and_answers(tmp_path, monkeypatch, capsys, fail):
    (tmp_path / "train.py").write_text(TRAINER)
    monkeypatch.setattr(sampling, "ROOT", tmp_path)
    code = command.main(
        f"--steps 1e3 --agents dqn ppo --every-seconds 0.01 --set fail={fail} "
        f"--max-slope-mb 1e9 --max-speed-change 1 "
        f"--runs {tmp_path / 'runs'} --report {tmp_path / 'page.md'}".split()
    )
    assert code == (1 if fail else 0)
    page = (tmp_path / "page.md").read_text()
    assert "agent=dqn env=cartpole total_steps=1000" in page and "ppo on cartpole" in page
    out = capsys.readouterr().out
    assert ("FAIL dqn on cartpole: exit code 5" in out) == bool(fail)
    assert len((tmp_path / "runs/dqn-cartpole/metrics.jsonl").read_text().splitlines()) == 40


@pytest.mark.slow
def test_a_short_real_soak(tmp_path):
    run_dir = tmp_path / "run"
    overrides = ["agent=dqn", "env=cartpole", "total_steps=20000", "device=cpu"]
    found = sampling.soak("dqn", overrides, run_dir, every_seconds=0.2)
    assert found.exit_code == 0 and len(found.samples) > 10
    assert found.logged[-1]["step"] >= 20_000
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
