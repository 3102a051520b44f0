"""`scripts/compare.py` on runs with known scores, speed and memory."""

import csv
import json

import pytest
from written_runs import write_run

from steadyrl.training.cli.compare import main

RISING = {1000: 10.0, 2000: 200.0, 3000: 490.0}


def summary(folder, **values):
    (folder / "summary.json").write_text(json.dumps({"status": "finished", **values}))
    return folder


def write_finished(folder, series, **options):
    return summary(write_run(folder, series, **options))


def two_groups(folder):
    for seed in range(4):
        fast_scores = {step: value + seed for step, value in RISING.items()}
        fast = write_run(folder / f"fast-{seed}", fast_scores, rate=0.01, seed=seed)
        peaks = {"rss_mb_peak": 90.0, "tree_mb_peak": 500.0 + seed}
        summary(fast, steps_per_second=1000.0 + seed, **peaks)
        slow_scores = {step: value / 2 + seed for step, value in RISING.items()}
        summary(
            write_run(folder / f"slow-{seed}", slow_scores, seed=seed),
            steps_per_second=9.0,
            rss_mb_peak=7.0,
        )


def compare(capsys, *arguments):
    main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_how_many_runs_reached_the_threshold_is_said_in_words(tmp_path, capsys):
    for seed, end in enumerate((300.0, 10.0, 10.0)):
        write_run(tmp_path / str(seed), {1000: end}, seed=seed)
    for arguments, first, second in (
        ([tmp_path, "--threshold", "100"], "–", "1 of 3 runs"),
        ([tmp_path, "--threshold", "5"], "1,000", "3 of 3 runs"),
        ([tmp_path, "--threshold", "1e6"], "never", "0 of 3 runs"),
        ([tmp_path / "0", "--threshold", "100"], "1,000", "1 of 1 run"),
    ):
        main([*map(str, arguments), "--markdown"])
        *_, row, _ = capsys.readouterr().out.splitlines()
        assert row.split("|")[5].strip() == f"{first} {second}"


def test_markdown_and_terminal_show_the_same_values(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    two_groups(tmp_path)
    main([str(tmp_path), "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "**CartPole-v1**"
    headings = ["group", "seeds", "score", "P(better)", "steps to 475", "s to 475", "steps/s"]
    assert [cell.strip() for cell in lines[2].split("|")][1:-2] == headings
    assert "| learning_rate=0.01 | 4 | 491.5 [" in lines[4]
    assert all(line.count("|") == 9 for line in lines[2:6])
    main([str(tmp_path)])
    out = capsys.readouterr().out
    for line in lines[4:6]:
        for cell in line.split("|")[2:-1]:
            assert all(word in out for word in cell.split())
    assert "…" not in out


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_fits_the_terminal_with_long_labels(tmp_path, capsys, monkeypatch, width):
    """Labels are on lines of their own and break between keys only."""
    monkeypatch.setenv("COLUMNS", str(width))
    keys = {f"key_number_{i}": 0 for i in range(40)}
    for at in range(2):
        run = write_run(tmp_path / f"r{at}", {10: 1234.5 + at, 20: 491.5}, seed=at)
        config = run / "config.yaml"
        text = "".join(f"  {key}: {at}\n" for key in keys)
        config.write_text(config.read_text() + f"more:\n{text}")
    main([str(tmp_path), "--threshold", "1234"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines if not line.startswith(("…", "not in")))
    assert len(lines) < 30
    labels = [line for line in lines if "key_number" in line]
    for part in ", ".join(labels).split(", "):
        assert part.strip(",").startswith("key_number_") and part.strip(",")[-2:] in ("=0", "=1")
    more = [line for line in lines if line.startswith("… and ")]
    shown = sum(line.count("=0") for line in labels)
    if more:
        assert more[0] == f"… and {40 - shown} more keys (--by chooses keys)"
    narrow = [line for line in lines if line.startswith("not in ")]
    assert bool(narrow) == (width < 60)
    if narrow:
        assert narrow[0].endswith("peak MB (--csv, --json and --markdown have them)")


def test_rows_are_sorted_by_a_column_best_first(tmp_path, capsys):
    for name, score, fast, last in (("a", 1.0, 9.0, 7), ("b", 3.0, 2.0, 5), ("c", 2.0, 5.0, 6)):
        run = write_run(tmp_path / name, {last: score})
        summary(run, steps_per_second=fast, rss_mb_peak=fast)
    places = [f"{name}={tmp_path / name}" for name in "cab"]

    def order(*typed):
        rows, _ = compare(capsys, *places, "--threshold", "1.5", *typed)
        return "".join(row["group"] for row in rows)

    assert order() == "cab"
    expected = {"group": "abc", "seeds": "cab", "score": "bca", "better": "bac", "steps": "bca",
                "seconds": "bca", "speed": "acb", "memory": "bca"}  # fmt: skip
    assert {key: order("--sort", key) for key in expected} == expected
    with pytest.raises(SystemExit):
        order("--sort", "beauty")


def test_csv_has_the_values_of_json(tmp_path, capsys):
    two_groups(tmp_path)
    rows, _ = compare(capsys, tmp_path)
    main([str(tmp_path), "--csv"])
    found = [*csv.DictReader(capsys.readouterr().out.splitlines())]
    assert found == [
        {key: "" if value is None else str(value) for key, value in row.items()} for row in rows
    ]


def test_a_bar_in_a_label_does_not_end_its_cell(tmp_path, capsys):
    main([f"a|b={write_run(tmp_path / 'run', {10: 1.0})}", "--markdown"])
    *_, row, _ = capsys.readouterr().out.splitlines()
    assert row.startswith("| a\\|b | 1 |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such run"),
        (["named="], "'': no such run"),
        (["yung"], "yung: no such run; did you mean young?"),
        (["x" * 300], "no such run"),
        (["name=" + "x" * 300], "no such run"),
        (["empty"], "empty: no run in this directory or below"),
        (["young"], "young has no evaluations"),
        (["run", "--by", "agent.lr"], "no such key"),
        (["=run"], "=run: write a name before the ="),
        (["run", "--threshold", "inf"], "--threshold=inf: must be finite"),
        (["run", "--normalise", "atari"], "no random and human score of CartPole-v1"),
        (["run", "--normalise", "atary"], "--normalise=atary: did you mean atari?"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", {10: 1.0})
    write_run(tmp_path / "young", {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and message in err and not out and len(err.splitlines()) == 1


def atari_runs(folder):
    """Two agents on two games, two seeds each, one of them halfway between random and human."""
    for game, random, human in (("Pong", -20.7, 14.6), ("Freeway", 0.0, 29.6)):
        for name, fraction in (("half", 0.5), ("good", 1.5)):
            for seed in range(2):
                end = random + (fraction + seed / 10) * (human - random)
                env = f"ALE/{game}-v5"
                write_finished(folder / f"{name}-{game}-{seed}", {10: end}, env=env, seed=seed)
    return [f"{name}={folder / name}-*" for name in ("half", "good")]


def test_normalised_scores_are_in_every_form_of_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    asked = [*atari_runs(tmp_path), "--normalise", "atari", "--sort", "normalised"]
    rows, _ = compare(capsys, *asked)
    assert [row["group"] for row in rows] == ["good", "half"] * 3
    main([*asked, "--csv"])
    found = [*csv.DictReader(capsys.readouterr().out.splitlines())]
    assert [row["normalised"] for row in found] == [str(row["normalised"]) for row in rows]
    main([*asked, "--markdown"])
    out = capsys.readouterr().out
    table = out.partition("**interquartile mean of 2 games**")[2].split("\n")
    assert table[2:4] == ["| group | runs | normalised |", "|---|---:|---:|"]
    assert table[5].startswith("| half | 4 | 0.550 [")
    main(asked)
    out = capsys.readouterr().out
    assert "not in 80 columns" not in out and max(map(len, out.splitlines())) <= 80
    assert all(f"{row['normalised']:.3f}" in out for row in rows)


def test_small_returns_keep_their_digits(tmp_path, capsys):
    for seed, value in enumerate((0.0123, 0.0133)):
        write_run(tmp_path / str(seed), {1000: value}, seed=seed)
    write_run(tmp_path / "large", {1000: 12345.678}, rate=0.1)
    main([str(tmp_path), "--markdown"])
    shown = capsys.readouterr().out
    assert "| 0.0128 [" in shown and "| 12,345.7 |" in shown
