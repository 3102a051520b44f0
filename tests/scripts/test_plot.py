import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.plot import aggregate, read

ROOT = Path(__file__).parent.parent.parent


def test_the_interval_is_students():
    curve = aggregate({"a": {1: 1.0, 2: 4.0}, "b": {1: 3.0, 2: 4.0, 3: 9.0}})
    assert curve.steps.tolist() == [1, 2]
    assert curve.mean.tolist() == [2.0, 4.0]
    # Two runs, one degree of freedom: 12.706 · s/√2 with s = √2.
    assert curve.half[0] == pytest.approx(12.706, rel=1e-3)
    assert curve.half[1] == 0.0


def test_one_run_has_no_interval():
    assert np.all(aggregate({"a": {1: 5.0}}).half == 0)


def write_run(folder: Path, series: dict[int, float], *, broken: tuple[str, ...] = ()) -> None:
    folder.mkdir()
    lines = [json.dumps({"step": s, "eval/return_mean": v}) for s, v in series.items()]
    lines[1:1] = broken
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def plot(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/plot.py", *arguments, "--out", str(folder / "p.png")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def rising(seed: int, evaluations: int = 6) -> dict[int, float]:
    """Evaluations of a run with several environments: each a few steps past the multiple."""
    random = np.random.default_rng(seed)
    steps = [5_000 * k + int(random.integers(0, 8)) for k in range(1, evaluations + 1)]
    return {step: step / 100 + seed for step in steps}


def test_evaluations_that_miss_each_other_by_a_few_steps_are_one_point():
    runs = {str(seed): rising(seed) for seed in range(6)}
    curve = aggregate(runs)
    assert len(curve.steps) == 6 and curve.runs == 6 and not curve.left_out
    np.testing.assert_allclose(curve.steps, 5_000 * np.arange(1, 7), atol=7)
    # Each run is its step / 100 + its seed, so the mean is that of the steps + 2.5.
    np.testing.assert_allclose(curve.mean, curve.steps / 100 + 2.5, atol=0.1)


def test_steps_that_all_share_are_taken_as_they_are_however_uneven():
    values = {1: 5.0, 2: 7.0, 3: 1.0, 1_000: 4.0, 9_000: 8.0}
    curve = aggregate({"a": values, "b": {step: v + 2 for step, v in values.items()}})
    assert curve.steps.tolist() == list(values)
    np.testing.assert_allclose(curve.mean, [v + 1 for v in values.values()])


def test_steps_of_another_rhythm_are_interpolated():
    coarse = {step: float(step) for step in range(100, 1_100, 100)}
    fine = {step: 3.0 * step for step in range(130, 1_000, 30)}
    curve = aggregate({"coarse": coarse, "fine": fine})
    assert len(curve.steps) >= 25
    inside = (curve.steps >= 130) & (curve.steps <= 990)
    np.testing.assert_allclose(curve.mean[inside], 2.0 * curve.steps[inside])


def test_where_the_shorter_run_ends_the_curve_ends_and_the_rest_is_named():
    runs = {"a": rising(0, 6), "b": rising(1, 9)}
    curve = aggregate(runs)
    assert curve.runs == 2 and len(curve.steps) == 6
    end = max(runs["a"])
    assert curve.left_out == [f"3 points of 1 runs after step {end:,}, where a ends"]


def test_a_run_that_died_early_is_left_out_so_that_the_end_is_the_end():
    runs = {"a": rising(0, 10), "b": rising(1, 10), "died": rising(2, 3)}
    curve = aggregate(runs)
    assert curve.runs == 2 and len(curve.steps) == 10
    assert curve.left_out == [
        f"died, which ends at step {max(runs['died']):,} of {max(max(r) for r in runs.values()):,}"
    ]


def test_lines_that_cannot_be_read_are_counted(tmp_path):
    broken = ('{"step": 7, "eval/return_', "[1]", "7", '{"eval/return_mean": 3}', "\x00",
              '{"step": 8, "eval/return_mean": NaN}', '{"step": 9, "eval/return_mean": "x"}',
              '{"step": 1e999, "eval/return_mean": 1}', "")  # fmt: skip
    write_run(tmp_path / "run", {1: 2.0, 3: 4.0, 2: 5.0}, broken=broken)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "train/loss": 1}\n\xff\xfe\n{"step": 4, "eval/re')
    series, unread = read(tmp_path / "run", "eval/return_mean")
    assert series == {1: 2.0, 2: 5.0, 3: 4.0} and list(series) == [1, 2, 3]
    assert unread == 10


def test_two_groups_of_six_are_drawn_to_their_end(tmp_path):
    for group, lift in (("a", 0), ("b", 50)):
        for seed in range(6):
            series = {step: value + lift for step, value in rising(seed + lift).items()}
            broken = ("{",) if seed == 3 else ()
            write_run(tmp_path / f"{group}-{seed}", series, broken=broken)
    (tmp_path / "b-empty").mkdir()
    done = plot(tmp_path, f"first={tmp_path}/a-*", f"second={tmp_path}/b-*")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| first")]
    assert rows[0][2].strip() == "6"
    assert float(rows[0][4].split("±")[0]) == pytest.approx(300 + 2.5, abs=0.2)
    assert abs(int(rows[0][5].replace(",", "")) - 30_003) < 5
    assert done.stderr.splitlines() == [
        "first: left out 1 lines of a-3 that cannot be read",
        "second: left out 1 lines of b-3 that cannot be read",
        "second: left out b-empty, which has no metrics.jsonl",
    ]


def test_the_command_draws_and_prints(tmp_path):
    for group, value in (("a", 1.0), ("b", 2.0)):
        for seed in range(3):
            write_run(tmp_path / f"{group}-{seed}", {10: value + seed})
    done = plot(tmp_path, f"first={tmp_path}/a-*", f"second={tmp_path}/b-*")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "p.png").stat().st_size > 5000
    assert "| second | 3 | 3.0 |" in done.stdout
    refused = plot(tmp_path, "x=/nowhere-*")
    assert refused.returncode == 2
    assert "no run directory matches" in refused.stderr
    untagged = plot(tmp_path, f"x={tmp_path}/a-*", "--tag", "eval/nothing")
    assert untagged.returncode == 2
    assert "a-0, which has no eval/nothing" in untagged.stderr
