import json

import pytest
from written_runs import write_run

from steadyrl.training.analysis import past_runs
from steadyrl.training.analysis.past_runs import NoRunError, find_runs, read_metrics, read_run

TAG = "eval/return_mean"


def test_unreadable_metric_lines_are_counted(tmp_path):
    broken = ('{"step": 7, "eval/return_', "[1]", "7", '{"eval/return_mean": 3}', "\x00",
              '{"step": 8, "eval/return_mean": NaN}', '{"step": 9, "eval/return_mean": "x"}',
              '{"step": 1e999, "eval/return_mean": 1}', "", '{"step": 9, "eval/return_mean": true}',
              "[" * 100_000, '{"step": 9, "eval/return_mean": 1' + "0" * 400 + "}")  # fmt: skip
    write_run(tmp_path / "run", {1: 2.0, 3: 4.0, 2: 5.0}, broken=broken)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "train/loss": 1}\n\xff\xfe\n{"step": 4, "eval/re')
    metrics, seconds, unread = read_metrics(tmp_path / "run" / "metrics.jsonl", [TAG])
    assert list(metrics[TAG].items()) == [(1, 2.0), (2, 5.0), (3, 4.0)]
    assert seconds == {1: 0.001, 2: 0.002, 3: 0.003}
    assert unread == 13


def test_the_later_line_of_a_repeated_step_counts(tmp_path):
    again = json.dumps({"step": 3, TAG: 9.0})
    write_run(tmp_path / "run", {3: 4.0, 5: 1.0})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(again + "\n")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl", [TAG])[0][TAG] == {3: 9.0, 5: 1.0}


def test_many_tags_of_ones_own_hide_no_curves(tmp_path):
    own = {f"callback/{k}": 1.0 for k in range(400)}
    (tmp_path / "m").write_text(
        json.dumps({"step": 1, **own}) + "\n" + json.dumps({"step": 2, TAG: 3.0, **own}) + "\n"
    )
    assert read_metrics(tmp_path / "m", None)[0].keys() == {TAG, *own}
    thinned = read_metrics(tmp_path / "m", None, 10)[0]
    assert thinned[TAG] == {2: 3.0} and len(thinned) == 301


def test_runs_are_found_by_path_recursively_and_by_pattern(tmp_path):
    for name in ("a/0", "a/1", "b"):
        write_run(tmp_path / name, {1: 1.0})
    (tmp_path / "b" / ".hydra").mkdir()
    (tmp_path / "b" / ".hydra" / "config.yaml").touch()
    of_a_tracker = tmp_path / "a" / "0" / "wandb" / "run-1" / "files"
    of_a_tracker.mkdir(parents=True)
    (of_a_tracker / "config.yaml").touch()
    (tmp_path / "c").mkdir()
    assert find_runs(str(tmp_path / "b")) == ([tmp_path / "b"], [])
    assert find_runs(str(tmp_path))[0] == [tmp_path / name for name in ("a/0", "a/1", "b")]
    runs, empty = find_runs(str(tmp_path / "[bc]"))
    assert (runs, empty) == ([tmp_path / "b"], [tmp_path / "c"])
    with pytest.raises(NoRunError, match="no run in this directory or below"):
        find_runs(str(tmp_path / "c"))


def test_presets_are_no_run(tmp_path, monkeypatch):
    write_run(tmp_path / "run", {1: 1.0})
    monkeypatch.setattr(past_runs, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.yaml").touch()
    assert find_runs(str(tmp_path))[0] == [tmp_path / "run"]
    with pytest.raises(NoRunError, match="no run in this directory or below"):
        find_runs(str(tmp_path / "configs"))


def test_a_run_without_metrics_is_read(tmp_path):
    folder = write_run(tmp_path / "run", {})
    (folder / "metrics.jsonl").unlink()
    (folder / "summary.json").write_text('{"status": ')
    run = read_run(folder, [TAG])
    assert (run.metrics, run.summary, run.is_running) == ({}, {}, False)
    assert run.env == "CartPole-v1" and run.config["agent.hidden"] == [16]
