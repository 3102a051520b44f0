import json
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import written_runs
from command import environment
from matplotlib import colormaps, colors

from steadyrl.training.analysis.curves import aggregate
from steadyrl.training.analysis.estimates import interquartile_mean
from steadyrl.training.cli import report
from steadyrl.training.cli.compare import main as compare
from steadyrl.training.cli.plot import COLOURS, main
from steadyrl.training.logging.terminal import score

ROOT = Path(__file__).parents[3]


def test_curves_cover_the_steps_of_all_runs():
    curve = aggregate({"a": {1: 1.0, 2: 4.0}, "b": {1: 3.0, 2: 4.0, 3: 9.0}})
    assert curve.x.tolist() == [1, 2]
    assert curve.centre.tolist() == [2.0, 4.0]
    # Two runs, one degree of freedom: Student's t of 12.706 instead of 1.96, half of the variance.
    half_width = 12.706 / 1.96 * np.sqrt(2)
    np.testing.assert_allclose(curve.low, [2 - half_width, 4.0], rtol=1e-3)
    np.testing.assert_allclose(curve.high, [2 + half_width, 4.0], rtol=1e-3)


def test_the_interval_of_one_run_has_zero_width():
    curve = aggregate({"a": {1: 5.0}})
    assert curve.low == curve.high == curve.centre == 5.0


def test_the_interquartile_mean_ignores_one_outlier():
    runs = {str(seed): {10: float(seed), 20: 2.0} for seed in range(5)}
    runs["4"][10] = 1e6
    assert aggregate(runs, interquartile_mean).centre.tolist() == [2.0, 2.0]


def write_run(folder: Path, series: dict[int, float], *, broken: tuple[str, ...] = ()) -> None:
    folder.mkdir()
    lines = [json.dumps({"step": s, "eval/return_mean": v}) for s, v in series.items()]
    lines[1:1] = broken
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def plot(folder: Path, *arguments: str, out: str = "p.png") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/plot.py", *arguments, "--out", str(folder / out)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )


def rising(seed: int, evaluations: int = 6) -> dict[int, float]:
    """Return evaluations of a run with several environments, a few steps past each multiple."""
    random = np.random.default_rng(seed)
    steps = [5_000 * k + int(random.integers(0, 8)) for k in range(1, evaluations + 1)]
    return {step: step / 100 + seed for step in steps}


def test_evaluations_a_few_steps_apart_are_one_point():
    runs = {str(seed): rising(seed) for seed in range(6)}
    curve = aggregate(runs)
    assert len(curve.x) == 6 and curve.runs == 6 and not curve.left_out
    np.testing.assert_allclose(curve.x, 5_000 * np.arange(1, 7), atol=7)
    # Each run is step / 100 + seed, so the mean is step / 100 + 2.5.
    np.testing.assert_allclose(curve.centre, curve.x / 100 + 2.5, atol=0.1)


def test_common_steps_are_used_as_they_are():
    values = {1: 5.0, 2: 7.0, 3: 1.0, 1_000: 4.0, 9_000: 8.0}
    curve = aggregate({"a": values, "b": {step: v + 2 for step, v in values.items()}})
    assert curve.x.tolist() == list(values)
    np.testing.assert_allclose(curve.centre, [v + 1 for v in values.values()])


def test_runs_with_other_evaluation_steps_are_interpolated():
    coarse = {step: float(step) for step in range(100, 1_100, 100)}
    fine = {step: 3.0 * step for step in range(130, 1_000, 30)}
    curve = aggregate({"coarse": coarse, "fine": fine})
    assert len(curve.x) >= 25
    inside = (curve.x >= 130) & (curve.x <= 990)
    np.testing.assert_allclose(curve.centre[inside], 2.0 * curve.x[inside])


def test_curves_end_with_the_shortest_run_and_name_the_rest():
    runs = {"a": rising(0, 6), "b": rising(1, 9)}
    curve = aggregate(runs)
    assert curve.runs == 2 and len(curve.x) == 6
    end = max(runs["a"])
    assert curve.left_out == [f"3 points of 1 runs after step {end:,}, where a ends"]


def test_runs_without_a_step_in_common_have_one_point():
    runs = {"long": {10_000: 1.0}, "short": {5_000: 2.0}}  # each has its last evaluation alone
    curve = aggregate(runs)
    assert (curve.x.tolist(), curve.centre.tolist(), curve.runs) == ([10_000], [1.5], 2)
    assert len(curve.left_out) == 2


def test_runs_that_failed_early_are_left_out_of_the_curve():
    runs = {"a": rising(0, 10), "b": rising(1, 10), "died": rising(2, 3)}
    curve = aggregate(runs)
    assert curve.runs == 2 and len(curve.x) == 10
    assert curve.left_out == [
        f"died, which ends at step {max(runs['died']):,} of {max(max(r) for r in runs.values()):,}"
    ]


@pytest.mark.parametrize("out", ["compared", "compared-1.5"])
def test_a_name_without_a_format_ends_in_png(tmp_path, out):
    write_run(tmp_path / "a", rising(0))
    done = plot(tmp_path, str(tmp_path / "a"), out=out)
    assert done.stdout.endswith(f"plot: {tmp_path / out}.png\n"), done.stderr
    assert (tmp_path / f"{out}.png").is_file()


def test_two_groups_of_six_runs_are_plotted_to_their_end(tmp_path):
    for group, offset in (("a", 0), ("b", 50)):
        for seed in range(6):
            series = {step: value + offset for step, value in rising(seed + offset).items()}
            broken = ("{",) if seed == 3 else ()
            write_run(tmp_path / f"{group}-{seed}", series, broken=broken)
    (tmp_path / "b-empty").mkdir()
    done = plot(tmp_path, f"first={tmp_path}/a-*", f"second={tmp_path}/b-*")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| first")]
    assert rows[0][2].strip() == "6"
    assert float(rows[0][4].split("[")[0]) == pytest.approx(300 + 2.5, abs=0.2)
    assert abs(int(rows[0][5].replace(",", "")) - 30_003) < 5
    assert done.stderr.splitlines() == [
        "first: left out 1 unreadable lines of a-3",
        "second: left out 1 unreadable lines of b-3",
        "second: left out b-empty, which has no metrics.jsonl",
    ]


def test_the_command_plots_and_prints_a_table(tmp_path, capsys):
    for group, value in (("a", 1.0), ("b", 2.0)):
        for seed in range(3):
            write_run(tmp_path / f"{group}-{seed}", {10: value + seed})
    done = plot(tmp_path, f"first={tmp_path}/a-*", f"second={tmp_path}/b-*")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "p.png").stat().st_size > 5000
    assert "| second | 3 | 3.0 |" in done.stdout
    for arguments, reason in (
        (["x=/nowhere-*"], "no run directory matches"),
        ([f"x={tmp_path}/a-*", "--tag", "eval/nothing"], "a-0 has no eval/nothing"),
    ):
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--out", str(tmp_path / "q.png")])
        assert end.value.code == 2
        assert reason in capsys.readouterr().err


def test_curves_include_every_seed_with_many_environments(tmp_path, capsys):
    """Runs with eight environments never log at the same steps; a former grid kept one of ten."""
    for rate in (0.001, 0.01):
        for seed in range(10):
            series = {step: v + 1000 * rate for step, v in rising(seed, 8).items()}
            written_runs.write_run(tmp_path / f"{rate}-{seed}", series, rate=rate, seed=seed)
    main([str(tmp_path), "--out", str(tmp_path / "p.png")])
    out, err = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if "=" in line]
    assert [(row[1], row[2]) for row in rows] == [
        ("learning_rate=0.001", "10"),
        ("learning_rate=0.01", "10"),
    ]
    assert [float(row[4].split("[")[0]) for row in rows] == pytest.approx([405.5, 414.5], abs=0.2)
    assert err == ""


def test_a_curve_ends_with_the_scores_and_the_interval_that_compare_shows(tmp_path, capsys):
    """Each run has its last evaluation a few steps from the others'."""
    finals = ((30_000, 8.0), (30_003, 129.0), (30_007, 70.0))
    for seed, (step, last) in enumerate(finals):
        series = {**rising(seed, 5), step: last}
        written_runs.write_run(tmp_path / str(seed), series, seed=seed)
    main([str(tmp_path), "--out", str(tmp_path / "p.png")])
    final = capsys.readouterr().out.splitlines()[2].split("|")[4].strip()
    compare([str(tmp_path), "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row["score"] == 69.0
    ends = (score(row["score_low"]), score(row["score_high"]))
    assert final == f"69.0 [{', '.join(ends)}]"


def test_environments_have_separate_panels_and_curves(tmp_path, capsys):
    for env in ("CartPole-v1", "Acrobot-v1"):
        for agent in ("dqn", "ppo"):
            folder = tmp_path / f"{env}-{agent}"
            written_runs.write_run(folder, {10: 1.0, 20: 2.0}, env=env, agent=agent)
    by = ["--by", "agent", "--by", "env"]  # as --by agent,env
    main([str(tmp_path), *by, "--out", str(tmp_path / "p.svg")])
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[2:6]]
    assert sorted(rows) == [
        "Acrobot-v1: dqn",
        "Acrobot-v1: ppo",
        "CartPole-v1: dqn",
        "CartPole-v1: ppo",
    ]
    assert (tmp_path / "p.svg").stat().st_size > 5000


def test_slower_seeds_are_interpolated_over_seconds(tmp_path, capsys):
    for seed, slowness in enumerate((1.0, 2.0)):
        folder = written_runs.write_run(tmp_path / str(seed), {}, seed=seed)
        lines = [
            {"step": 100 * k, "wall_seconds": 10.0 * k * slowness, "eval/return_mean": 10.0 * k}
            for k in range(1, 11)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main([str(tmp_path), "--x", "seconds", "--out", str(tmp_path / "p.png")])
    out, err = capsys.readouterr()
    row = [cell.strip() for cell in out.splitlines()[2].split("|")]
    # At 100 s the fast seed has 100 and the slow one 50; beyond, only the slow one has points.
    assert row[4].startswith("75.0") and row[5] == "100"
    assert "5 points of 1 runs after second 100, where 0 ends" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such run"),
        (["empty"], "empty: no run in this directory or below"),
        (["file"], "file: is a file"),
        (["run", "--tag", "eval/nothing"], "run has no eval/nothing"),
        (["run", "--by", "agent.lr"], "no such key"),
        (["=run"], "=run: write a name before the ="),
        (["run", "--out", "p.nonsense"], "--out=p.nonsense: cannot be written"),
        (["broken"], "config.yaml: cannot be read"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    written_runs.write_run(tmp_path / "run", {10: 1.0})
    written_runs.write_run(tmp_path / "broken", {10: 1.0})
    (tmp_path / "broken" / "config.yaml").write_text("agent: [1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and message in err and not out
    assert len(err.splitlines()) == 1 and not (tmp_path / "curves.png").exists()


def test_a_running_run_is_plotted_with_a_note(tmp_path, capsys):
    folder = written_runs.write_run(tmp_path / "run", {10: 1.0})
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    holder += "; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(folder / ".lock")], stdin=-1, stdout=-1
    ) as process:
        process.stdout.readline()
        main([str(folder), "--out", str(tmp_path / "p.png")])
        process.stdin.close()
    assert capsys.readouterr().err == "dqn: run is still running\n"


def test_colours_are_distinct_for_colour_blind_readers():
    """Colour blindness is simulated after Viénot et al. 1999; two of tab10 are only 0.04 apart."""
    assert smallest_distance(COLOURS) > 0.12 > smallest_distance(colormaps["tab10"].colors)


def smallest_distance(palette):
    """Return the smallest distance between two colours under simulated colour blindness."""
    to_lms = np.array(
        [[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]]
    )
    seen = np.array([colors.to_rgb(colour) for colour in palette]) ** 2.2 @ to_lms.T
    no_red, no_green = seen.copy(), seen.copy()
    no_red[:, 0] = 2.02344 * seen[:, 1] - 2.52581 * seen[:, 2]
    no_green[:, 1] = 0.494207 * seen[:, 0] + 1.24827 * seen[:, 2]
    least = []
    for lms in (no_red, no_green):
        visible = np.clip(lms @ np.linalg.inv(to_lms).T, 0, 1) ** (1 / 2.2)
        distance = np.linalg.norm(visible[:, None] - visible[None, :], axis=-1)
        least.append(distance[~np.eye(len(palette), dtype=bool)].min())
    return min(least)


def test_a_tag_that_is_nearly_one_is_told_of_it(tmp_path):
    write_run(tmp_path / "run", rising(0))
    done = plot(tmp_path, str(tmp_path / "run"), "--tag", "eval/return")
    assert done.returncode != 0
    assert (
        "has no eval/return, like all 1 runs given; did you mean eval/return_mean?" in done.stderr
    )


def test_the_same_run_twice_is_one_seed_without_a_band(tmp_path, capsys, monkeypatch):
    for name in "ab":
        written_runs.write_run(tmp_path / name, {10: 1.0, 20: 2.0})
    drawn = []
    savefig = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(savefig, lambda figure, *_, **__: drawn.append(figure))
    main([str(tmp_path), "--tag", "eval/return_mean", "--out", str(tmp_path / "p.png")])
    out, err = capsys.readouterr()
    assert "| dqn | 1 | 1.5 | 2.0 | 20 |" in out
    assert err == "dqn: seed 0 twice with the same settings: left out a\n"
    (figure,) = drawn
    (panel,) = figure.axes
    assert len(panel.lines) == 1 and not panel.collections
    assert figure.legends[0].get_texts()[0].get_text() == "dqn (1 seed)"
    assert figure.get_suptitle() == "one seed each"


@pytest.mark.parametrize("program", [main, report.main])
@pytest.mark.parametrize("out", ["", "/"])
def test_an_output_without_a_name_is_refused_in_one_line(program, out, tmp_path, capsys):
    written_runs.write_run(tmp_path / "run", {10: 1.0})
    with pytest.raises(SystemExit) as ended:
        program([str(tmp_path / "run"), "--out", out])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("names no file\n")


def test_small_returns_keep_their_digits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written_runs.write_run(tmp_path / "run", {10: 0.0123, 20: 0.95})
    main(["run"])
    assert "| dqn | 1 | 0.481 | 0.95 | 20 |" in capsys.readouterr().out


@pytest.mark.parametrize(("program", "name"), [(main, "p.png"), (report.main, "r.html")])
def test_a_full_disk_leaves_the_picture_that_was_there(tmp_path, program, name, capsys):
    written_runs.write_run(tmp_path / "run", {10: 1.0, 20: 3.0})
    out = tmp_path / name
    out.write_text("the last one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(SystemExit) as ended:
            program([str(tmp_path / "run"), "--out", str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.value.code == 2 and "cannot be written: " in capsys.readouterr().err
    assert out.read_text() == "the last one"
    assert sorted(os.listdir(tmp_path)) == sorted([name, "run"])


@pytest.mark.parametrize("program", [main, report.main])
def test_a_pipe_is_not_replaced_by_a_file(tmp_path, program, capsys):
    written_runs.write_run(tmp_path / "run", {10: 1.0})
    pipe = tmp_path / "pipe.html"
    os.mkfifo(pipe)
    with pytest.raises(SystemExit) as ended:
        program([str(tmp_path / "run"), "--out", str(pipe)])
    assert ended.value.code == 2 and capsys.readouterr().err.endswith("is not a plain file\n")
    assert pipe.is_fifo()


def test_runs_that_did_not_finish_are_named(tmp_path, capsys):
    for name, status in (("a", "finished"), ("b", "failed"), ("c", "diverged")):
        written_runs.write_run(tmp_path / name, {10: 1.0, 20: 2.0}, seed=ord(name))
        (tmp_path / name / "summary.json").write_text(json.dumps({"status": status}))
    main([str(tmp_path), "--tag", "eval/return_mean", "--out", str(tmp_path / "p.png")])
    assert capsys.readouterr().err.splitlines() == [
        "dqn: b did not finish: failed",
        "dqn: c did not finish: diverged",
    ]


@pytest.mark.parametrize("groups", [3, 60])
def test_axes_keep_their_height_beside_many_groups(tmp_path, monkeypatch, groups):
    for rate in range(groups):
        written_runs.write_run(tmp_path / str(rate), {10: 1.0, 20: 2.0}, rate=rate + 1)
    heights = []

    def measure(figure, *_):
        figure.draw_without_rendering()
        heights.append([axes.get_window_extent().height / figure.dpi for axes in figure.axes])

    monkeypatch.setattr("steadyrl.training.cli.plot.save_figure", measure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main([str(tmp_path), "--tag", "eval/return_mean", "--out", str(tmp_path / "p.png")])
    assert [height > 1.5 for height in heights[0]] == [True]
