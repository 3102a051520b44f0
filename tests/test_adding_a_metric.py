"""The steps of "Add a metric" in CONTRIBUTING.md, followed one by one."""

import json
import re
from pathlib import Path

import pytest
from opened import job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from steadyrl.agents.dqn import agent as dqn
from steadyrl.agents.dqn import build as dqn_building
from steadyrl.agents.dqn import loss as dqn_loss
from steadyrl.loop import train
from steadyrl.training import setup as opening
from steadyrl.training.logging.charts import CHARTS
from steadyrl.training.logging.sinks import Sink
from tests.docs import test_pages

ROOT = Path(__file__).parent.parent
FEW = ("total_steps=300", "eval.every=0", "log.every=100", "agent.learning_starts=50")


class RecordingSink(Sink):
    """A sink that records scalars."""

    def __init__(self):
        self.seen, self.closed = [], False

    def write_video(self, step, gif):
        pass

    def continue_after(self, step):
        self.seen = []

    def write(self, record):
        self.seen.append(dict(record.scalars))

    def close(self):
        self.closed = True


def section():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text.partition("## Add a metric\n")[2].partition("\n## ")[0]


@pytest.fixture
def added_metrics(monkeypatch):
    """Add a metric to DQN's loss, and a scalar to the agent."""

    def with_rewards(*arguments, **options):
        loss = dqn_loss.td_loss(*arguments, **options)
        (batch,) = (each for each in arguments if hasattr(each, "reward"))
        return loss._replace(metrics=(*loss.metrics, batch.reward))

    scalars = dqn.DQN.scalars
    monkeypatch.setattr(dqn_building, "td_loss", with_rewards)
    monkeypatch.setattr(dqn_building, "METRICS", (*dqn_loss.METRICS, "train/batch_reward"))
    monkeypatch.setattr(dqn.DQN, "scalars", lambda self: scalars(self) | {"train/answer": 42.0})


@pytest.mark.slow
def test_metrics_of_loss_and_agent_reach_every_sink(added_metrics, tmp_path, monkeypatch):
    sink, logger = RecordingSink(), opening.Logger
    monkeypatch.setattr(
        opening,
        "Logger",
        lambda path, card, others, **options: logger(path, card, [*others, sink], **options),
    )
    # With n = 1 every reward of CartPole is 1, and so is their mean.
    train(job(tmp_path, *FEW, "agent.n_step=1"))
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(run)).Reload()
    for tag, value in (("train/batch_reward", 1.0), ("train/answer", 42.0)):
        assert {line[tag] for line in lines if tag in line} == {value}
        assert {event.value for event in events.Scalars(tag)} == {value}
        assert {record[tag] for record in sink.seen if tag in record} == {value}
    assert sink.closed


def test_undocumented_and_unwritten_tags_fail_the_page_test(monkeypatch):
    """Undocumented tags fail, and so do documented tags that are never written."""
    check, sources = (
        test_pages.test_written_tags_are_documented_and_documented_tags_written,
        test_pages.sources,
    )
    check()
    monkeypatch.setattr(test_pages, "sources", lambda: [*sources(), 'METRICS = ("train/answer",)'])
    with pytest.raises(AssertionError, match="train/answer"):
        check()
    without = [text.replace("td_error", "") for text in sources()]
    monkeypatch.setattr(test_pages, "sources", lambda: without)
    with pytest.raises(AssertionError, match="train/td_error"):
        check()


def test_names_in_the_steps_exist_in_the_code():
    text = section()
    for path, name in (
        ("core/metrics.py", "class Metrics"),
        ("agents/dqn/loss.py", "METRICS ="),
        ("agents/base.py", "def scalars"),
        ("training/run/episode_counter.py", "class "),
        ("training/logging/charts.py", "CHARTS"),
        ("training/logging/sinks.py", "class Sink"),
        ("training/setup.py", "def _trackers"),
    ):
        assert name in (ROOT / path).read_text()
        assert path in text
    assert set(re.findall(r"`(\w+)`", text)) >= {
        "Metrics",
        "CHARTS",
        "Sink",
        "failures",
        "_trackers",
    }
    assert Sink.__abstractmethods__ == {"continue_after", "write", "write_video", "close"}
    assert Sink.failures
    assert "learning" in CHARTS
