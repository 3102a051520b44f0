"""The report of written runs: what it shows, what it survives, and that nothing escapes from it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from command import environment
from written_runs import write_run

from steadyrl.core.command.typed import command_of
from steadyrl.training.analysis.past_runs import read_metrics
from steadyrl.training.cli.report import main
from steadyrl.training.report.chart import short, ticks

HOSTILE = "<script>alert(1)</script>&\"'"
SUMMARY = {"status": "finished", "steps": 30_000, "return_mean": 20.0, "wall_seconds": 3_725.4,
           "eval_return_mean": 100.0, "eval_return_std": 6.0, "eval_episodes": 10,
           "best_eval_return_mean": 120.0, "steps_per_second": 812.3,
           "rss_mb_peak": 456.0}  # fmt: skip
VOID = ("meta", "path", "circle", "img", "!doctype")


class Page(HTMLParser):
    """The elements, attributes and text of a page; fails on elements that it should not have."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def report(folder: Path, *arguments: object) -> Page:
    out = folder / "out.html"
    main([*map(str, arguments), "--out", str(out)])
    text = out.read_text()
    assert len(text) < 2_000_000 and "nan" not in text.partition("</style>")[2].lower()
    page = Page(text)
    assert not {"script", "iframe", "link", "object"} & set(page.elements)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert all(v.startswith("data:") for name, v in page.attributes if name == "src")
    assert not [v for name, v in page.attributes if name == "href" and ":" in v]
    return page


def rising(growth: float, count: int = 6) -> dict[int, float]:
    return {5_000 * k: growth * k for k in range(1, count + 1)}


def finished(folder: Path, **summary: object) -> Path:
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **summary}))
    return folder


def test_one_run_shows_its_end_scores_curves_and_configuration(tmp_path):
    series = rising(20.0)
    run = write_run(tmp_path / "s3", series, seed=3, eval_return_std=dict.fromkeys(series, 6.0),
                    train_loss=series, time_steps_per_second=series,
                    memory_rss_mb=series)  # fmt: skip
    page = report(tmp_path, finished(run))
    for text in ("DQN on CartPole-v1", "finished", "exit code 0", "30,000", "1:02:05", "456",
                 f"{command_of()} resume={run} total_steps=60000", "train/loss",
                 "time/steps_per_second", "host, MB"):  # fmt: skip
        assert text in page.text, text
    # Student's t of nine degrees of freedom: 2.262 · 6 / √9.
    assert "100.0 [95.5, 104.5]" in page.text
    # Of configs/agent/dqn.yaml and config.yaml, total_steps and hidden differ; the seed is above.
    rows = page.text.partition("Configuration")[2]
    assert "total_steps3000050000" in rows and "agent.hidden[16]" in rows and "seed" not in rows


def test_a_killed_run_shows_the_scores_that_it_logged(tmp_path):
    run = write_run(tmp_path / "a", rising(20.0, 6))
    lines = (run / "metrics.jsonl").read_text() + json.dumps(
        {"step": 70, "rollout/return_mean": 99.5}
    )
    (run / "metrics.jsonl").write_text(f"{lines}\n")
    row = report(tmp_path, run).text.partition("peak MB")[2].partition("It left no summary")[0]
    assert "killed" in row and "99.5" in row and "120" in row


def test_the_configuration_shows_values_whole(tmp_path):
    run = write_run(tmp_path / "s3", rising(20.0), rate=1.23456789e-05)
    policy = f"/data/{'long/' * 20}outputs/cartpole-dqn-s3/policy-best"
    with (run / "config.yaml").open("a") as config:
        config.write(f"init_from: {policy}\n")
    rows = report(tmp_path, finished(run)).text.partition("Configuration")[2]
    assert policy in rows and "1.23456789e-05" in rows


def test_seeds_of_a_group_have_a_band_and_an_interval(tmp_path):
    for seed in range(3):
        finished(write_run(tmp_path / "runs" / f"s{seed}", rising(20.0 + seed), seed=seed))
    page = report(tmp_path, tmp_path / "runs")
    assert page.text.count("finished") == 3 and "exit code" not in page.text
    assert "Over seeds" in page.text and "126.0" in page.text and "120.0 … 132.0" in page.text
    assert ("class", "band c0") in page.attributes
    # Three seeds, 120, 126, 132: 126 ± 4.303 · 6 / √3 is 14.9; the bootstrap's is close.
    low, high = page.text.partition("Over seeds")[2].partition("[")[2].partition("]")[0].split(",")
    assert float(low) == pytest.approx(126 - 14.9, abs=3)
    assert float(high) == pytest.approx(126 + 14.9, abs=3)


def test_groups_have_a_line_each_in_a_chart_for_each_metric(tmp_path):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        write_run(tmp_path / "runs" / name, rising(5.0), rate=rate, train_loss=rising(1.0))
    page = report(tmp_path, tmp_path / "runs")
    assert page.text.count("learning_rate=0.1 ") == 2  # in the legends of two charts
    assert page.elements.count("figure") == 2


def test_the_same_runs_give_the_same_bytes(tmp_path):
    run = finished(write_run(tmp_path / "a", rising(1.0)))
    main([str(run), "--out", str(tmp_path / "1.html")])
    main([str(run), "--out", str(tmp_path / "2.html")])
    assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()


def test_text_of_files_is_escaped(tmp_path):
    run = write_run(tmp_path / HOSTILE.replace("/", "-"), {10: 1.0})
    config = {"agent": {"name": HOSTILE, HOSTILE: HOSTILE}, "env": {"id": HOSTILE}, "seed": HOSTILE}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / ".hydra").mkdir()
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([HOSTILE]))
    lines = [{"step": step, HOSTILE: 1.0, "eval/return_mean": 2.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    finished(run, status=HOSTILE)
    (run / "train.log").write_text(f"2026-01-01 00:00:00,000 WARNING {HOSTILE}\n")
    (run / "videos").mkdir()
    (run / "videos" / "<b onclick=x>.mp4").write_bytes(b"x")
    page = report(tmp_path, run)
    assert page.text.count("<script>alert(1)</script>") >= 8
    finished(run, status="failed")
    (run / "train.log").write_text(f"Traceback (most recent call last):\nValueError: {HOSTILE}\n")
    assert f"failed · {HOSTILE}" in report(tmp_path, run).text


def test_names_that_are_not_unicode_are_written(tmp_path):
    run = write_run(tmp_path / "a", rising(1.0)).rename(tmp_path / os.fsdecode(b"r\xff\xfen"))
    assert "r??n" in report(tmp_path, run).text


BROKEN = {
    "empty": b"",
    "not a number": b'{"step": 1, "eval/return_mean": NaN}\n{"step": 2, "train/loss": Infinity}\n',
    "one evaluation": b'{"step": 1, "eval/return_mean": 5.0, "eval/return_std": 1.0}\n',
    "cut": b'{"step": 1, "train/loss": 1.0}\n{"step": 2, "train/lo',
    "binary": bytes(range(256)) * 20,
    "texts": b'{"step": 1, "train/loss": "high"}\n[1, 2]\n{"step": "x"}\n{"step": true}\n',
    "largest": b'{"step": 1, "train/loss": 1e308}\n{"step": 2, "train/loss": -1e308}\n',
    "smallest": b'{"step": 1, "train/loss": 1e-320}\n{"step": 2, "train/loss": 0}\n',
    "negative steps": b'{"step": -5, "train/loss": 1}\n{"step": -3, "train/loss": 2}\n',
    "far steps": b'{"step": 1e300, "train/loss": 1}\n',
    "many tags": json.dumps({"step": 1, **{f"x/{k}": k for k in range(5_000)}}).encode(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_metrics_give_a_report(tmp_path, name, seeds):
    for seed in range(seeds):
        run = write_run(tmp_path / "runs" / f"s{seed}", {}, seed=seed)
        (run / "metrics.jsonl").write_bytes(BROKEN[name])
    page = report(tmp_path, tmp_path / "runs")
    assert "killed" in page.text
    if name == "empty":
        assert "No metrics were logged" in page.text
    if name in ("not a number", "cut", "texts"):
        assert "unreadable lines" in page.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"steps": "x"}',
        '{"steps": 1e400, "x": NaN}',
        '{"steps": 1' + "0" * 400 + "}",
    ],
)
def test_broken_summaries_give_a_report(tmp_path, text):
    run = write_run(tmp_path / "a", rising(1.0))
    (run / "summary.json").write_text(text)
    assert "killed" in report(tmp_path, run).text


def test_long_runs_are_thinned_out(tmp_path):
    run = write_run(tmp_path / "a", {})
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            tag = "eval/return_mean" if step % 10 == 0 else "train/loss"
            file.write(json.dumps({"step": step, tag: step / 7}) + "\n")
    metrics, _, _ = read_metrics(run / "metrics.jsonl", None, 300)
    for tag, first, last in (("eval/return_mean", 10, 20_000), ("train/loss", 1, 19_999)):
        steps = list(metrics[tag])
        assert (len(steps), steps[0], steps[-1]) == (300, first, last)
        assert max(b - a for a, b in pairwise(steps)) < 2 * 20_000 / 300
    assert "20k" in report(tmp_path, run).text and (tmp_path / "out.html").stat().st_size < 100_000


def test_the_report_of_many_groups_stays_small(tmp_path):
    tags = {f"train_x{k}": {step: math.sin(step * k) for step in range(1, 300)} for k in range(12)}
    for k in range(40):
        write_run(tmp_path / "runs" / f"r{k}", tags["train_x1"], rate=0.1 + k, **tags)
    page = report(tmp_path, tmp_path / "runs")
    assert page.elements.count("figure") == 13 and "12 more not drawn" in page.text


def log(run: Path, error: str) -> None:
    (run / "train.log").write_text(
        "2026-01-01 00:00:00,000 DEBUG the run failed\n"
        "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n\n"
        "The above exception was the direct cause …\n\n"
        f"Traceback (most recent call last):\n  File y\n{error}\n"
        "2026-01-01 00:00:01,000 INFO failed after 3 steps\n"
    )


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        ("failed", "envs.types.EnvironmentFailedError: 3 died", ("code 4 · 3 died", "tail -n 40")),
        ("failed", "core.errors.MemoryBudgetError: 9 GB", ("exit code 7 · 9 GB", "resume=")),
        ("failed", "callback.CallbackError: mine:C failed", ("exit code 4 · mine:C", "tail -n 40")),
        ("failed", "comm.PeerLostError: rank 1", ("exit code 8 · rank 1", "resume=")),
        ("failed", "ValueError", ("failed · ValueError", "resume=")),
        ("diverged", "errors.NonFiniteError: loss", ("exit code 5", "lower learning rate (it was")),
        ("interrupted", "OSError: of an earlier attempt", ("130 (Ctrl-C)", "resume=")),
    ],
)
def test_a_run_that_did_not_finish_says_why_and_what_to_do(tmp_path, status, error, expected):
    run = finished(write_run(tmp_path / "a", rising(1.0)), status=status)
    log(run, error)
    text = report(tmp_path, run).text
    assert all(part in text for part in expected)
    assert "KeyError" not in text and ("earlier" not in text)


@pytest.mark.parametrize("what", ["set", "is reached: 9 MB are used. Raise the limit to"])
def test_a_run_that_ended_at_its_own_limit_goes_on_with_a_higher_one(tmp_path, what):
    run = finished(write_run(tmp_path / "a", rising(1.0)), status="failed")
    log(run, f"core.errors.MemoryBudgetError: memory.limit_mb=9 {what} memory.limit_mb=300 or more")
    assert f"resume={run} memory.limit_mb=300" in report(tmp_path, run).text


def test_infinity_from_the_environment_does_not_blame_the_learning_rate(tmp_path):
    run = finished(write_run(tmp_path / "a", rising(1.0), env="mine:Maze-v0"), status="diverged")
    log(run, "errors.NonFiniteError: reward of environment 0 is not finite at step 9: it is inf")
    text = report(tmp_path, run).text
    assert "envs check mine:Maze-v0" in text.replace(command_of("envs"), "envs")
    assert "learning rate" not in text.partition("Learning curves")[0]


def test_commands_that_come_next_name_the_users_modules_again(tmp_path):
    run = write_run(tmp_path / "a", rising(1.0), env="mine:Maze-v0")
    (run / "policy").mkdir()
    assert f"resume={run} env.id=mine:Maze-v0" in report(tmp_path, run).text
    text = report(tmp_path, finished(run)).text
    assert f"{run} --env id=mine:Maze-v0 --episodes 100" in text
    assert f"resume={run} env.id=mine:Maze-v0 total_steps=" in text


def test_warnings_of_the_log_are_shown(tmp_path):
    run = finished(write_run(tmp_path / "a", rising(1.0)))
    lines = [f"2026-01-01 00:00:0{k},000 WARNING full disk {k}\n" for k in range(8)]
    since = "2026-01-02 00:00:09,000 INFO step 1 of 9\n" * 10_000  # of days without a terminal
    (run / "train.log").write_text("".join(lines) + since)
    text = report(tmp_path, run).text
    assert "full disk 7" in text and "full disk 3" in text and "full disk 2" not in text


def test_a_running_run_says_so(tmp_path):
    run = write_run(tmp_path / "a", rising(1.0))
    program = "import fcntl,os,sys;h=os.open(sys.argv[1],os.O_RDWR|os.O_CREAT);" \
        "fcntl.lockf(h,fcntl.LOCK_EX);print(flush=True);sys.stdin.read()"  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", program, str(run / ".lock")],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:  # fmt: skip
        holder.stdout.readline()
        assert "Still running" in report(tmp_path, run).text
        holder.stdin.close()
    assert "killed" in report(tmp_path, run).text


def test_small_films_are_in_the_page_and_others_linked(tmp_path):
    run = finished(write_run(tmp_path / "runs" / "a", rising(1.0)))
    (run / "videos").mkdir()
    for name, size in (("step-1.mp4", 10), ("step-2.mp4", 20), (".part.mp4", 5), ("notes.txt", 5)):
        (run / "videos" / name).write_bytes(b"f" * size)
    page = report(tmp_path, run)
    assert page.elements.count("video") == 1 and "step-2.mp4" in page.text
    assert [v for name, v in page.attributes if name == "href"] == ["runs/a/videos/step-1.mp4"]
    assert ".part" not in page.text and "notes" not in page.text
    (run / "videos" / "step-3.mp4").write_bytes(b"f" * 1_000_001)
    page = report(tmp_path, run)
    assert "video" not in page.elements and page.elements.count("a") == 3


def test_files_are_written_where_they_are_expected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_run(tmp_path / "runs" / name, rising(1.0))
    main(["runs/a"])
    assert capsys.readouterr().out == "report: runs/a/report.html\n"
    main(["runs", "missing=runs/b"])
    assert capsys.readouterr().out == "report: report.html\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "runs"]
    main(["runs/a", "--out", "-"])
    assert capsys.readouterr().out == (tmp_path / "runs" / "a" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "nowhere: no such run"),
        (["a", "--out", "x.pdf"], "--out=x.pdf: must end in .html: the report is a page"),
        (["a", "--out", "missing/x.html"], "--out=missing/x.html: cannot be written: No such file"),
        (["a", "--out", "a"], "--out=a: cannot be written: Is a directory"),
        (["a", "--by", "agent.nme"], "did you mean agent.name?"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, error):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", rising(1.0))
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and error in printed and printed.count("\n") == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "config.yaml", "metrics.jsonl"]


def test_a_report_needs_no_plotting_library(tmp_path):
    write_run(tmp_path / "a", rising(1.0))
    program = "import sys; from steadyrl.training.cli.report import main; main(['a']);" \
        "assert not {'matplotlib', 'plotly', 'tensorboard'} & set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), check=True)
    assert (tmp_path / "a" / "report.html").is_file()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-3, 7, [-2, 0, 2, 4, 6]), (99, 102, [99, 100, 101, 102])],
)
def test_ticks_are_round_numbers_in_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_numbers_are_short():
    assert [short(v) for v in (0, 950, 12_500, -3e6, 0.0002, 7e12)] == [
        "0", "950", "12.5k", "-3M", "0.0002", "7e+12",
    ]  # fmt: skip
