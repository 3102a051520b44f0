"""Traces of updates: what is recorded, when, and that nothing is changed by it."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from opened import job

from steadyrl.core.errors import SettingError
from steadyrl.loop import train

DQN = ("agent=dqn", "device=cpu", "agent.hidden=[8]", "agent.compile=false",
       "agent.learning_starts=50", "agent.batch_size=16", "agent.train_every=2", "eval.every=0",
       "total_steps=120", "report.at_end=false")  # fmt: skip
CYCLE = ("profiler.wait=3", "profiler.warmup=1", "profiler.active=2", "profiler.repeat=2")


def traces(run: Path) -> dict[str, list[dict]]:
    return {
        path.name: json.loads(gzip.open(path).read())["traceEvents"]
        for path in sorted((run / "profiler").glob("*"))
    }


def named(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["name"] == name]


def test_some_updates_are_recorded_and_training_is_the_same(tmp_path, recwarn):
    plain = train(job(tmp_path / "plain", *DQN, quick=False)).summary
    with_trace = ("profiler.enabled=true", *CYCLE)
    traced = train(job(tmp_path / "traced", *DQN, *with_trace, quick=False)).summary
    assert traced.weights_sha256 == plain.weights_sha256 and traced.updates > 12
    assert not (tmp_path / "plain" / "run" / "profiler").exists()
    found = traces(tmp_path / "traced" / "run")
    assert list(found) == ["updates.12.pt.trace.json.gz", "updates.6.pt.trace.json.gz"]
    for events in found.values():
        # Step by step, there are calls between the two that make no gradient step.
        assert 2 <= len({event["ts"] for event in named(events, "update")}) <= 6
        products = [event for event in events if event["name"] in ("aten::mm", "aten::addmm")]
        assert any("Input Dims" in event.get("args", {}) for event in products)
        assert named(events, "[memory]")
    assert not [each for each in recwarn if "Profiler" in str(each.message)]


def test_a_run_that_ends_before_leaves_what_was_recorded(tmp_path):
    early = ("profiler.enabled=true", "profiler.wait=3", "profiler.active=1000")
    summary = train(job(tmp_path, *DQN, *early, quick=False)).summary
    ((name, events),) = traces(Path(summary.run_dir)).items()
    recorded = len({event["ts"] for event in named(events, "update")})
    calls = int(name.split(".")[1])
    assert 3 + 2 < calls < summary.steps and recorded >= calls - 5  # without wait and warm-up


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, capsys, monkeypatch):
    def full(trace, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    asked = job(tmp_path, *DQN, "profiler.enabled=true", *CYCLE, quick=False)
    assert train(asked).summary.status == "finished"
    printed = "".join(capsys.readouterr())
    assert printed.count("cannot write the trace") == 2 and "No space left" in printed


@pytest.mark.parametrize(
    "wrong", ["active=0", "repeat=0", "wait=-1", "warmup=-1", "active=1_000_000"]
)
def test_impossible_schedules_are_refused(tmp_path, wrong):
    with pytest.raises(SettingError, match=f"^profiler.{wrong.partition('=')[0]}="):
        job(tmp_path, *DQN, f"profiler.{wrong}", quick=False)
