"""Event files as TensorBoard's own code reads them."""

import errno
import os
import shlex
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler
from tensorboard.util import tensor_util

from steadyrl.training.logging.charts import CHARTS
from steadyrl.training.logging.logger import Logger
from steadyrl.training.logging.sinks import RunInfo
from steadyrl.training.logging.tensorboard import EventFile

CONFIG = {
    "agent": {"name": "dqn", "learning_rate": 0.01, "hidden": [64, 64]},
    "env": {"id": "CartPole-v1", "num_envs": 8},
    "eval": {"every": 10},
    "seed": 3,
    "total_steps": 1000,
}
TYPED = ["agent=dqn", "experiment=fast", "agent.hidden=[64,64]", "+agent.learning_rate=1e-2"]
CARD = RunInfo("s3", CONFIG, TYPED)


def write_run(folder, info=CARD, steps=(10, 20)):
    folder.mkdir(exist_ok=True)
    logger = Logger(folder, info)
    for step in steps:
        episodes = [(step - 1, 5.0), (step, float(step))]
        logger.write(step, {"eval/return_mean": step / 2}, step / 10, episodes, [5.0, float(step)])
    logger.close()
    return folder


def read(folder):
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    return multiplexer


def texts(multiplexer, tag):
    return [
        (event.step, tensor_util.make_ndarray(event.tensor_proto).item().decode())
        for event in multiplexer.Tensors("run", tag)
    ]


def scalars(multiplexer, tag, run=None):
    """Return (step, value) of a tag; evaluations are a run of their own."""
    return [
        (event.step, tensor_util.make_ndarray(event.tensor_proto).item())
        for event in multiplexer.Tensors(run or ("run/eval" if tag[:5] == "eval/" else "run"), tag)
    ]


def test_episode_returns_are_logged_at_their_own_steps(tmp_path):
    write_run(tmp_path / "run")
    found = read(tmp_path)
    assert scalars(found, "rollout/return") == [(9, 5), (10, 10), (19, 5), (20, 20)]
    assert scalars(found, "eval/return_mean") == [(10, 5), (20, 10)]


def test_the_histogram_counts_every_return(tmp_path):
    returns = [0.0] * 7 + [100.0] * 3
    logger = Logger(tmp_path / "run", CARD)
    (tmp_path / "run").mkdir()
    logger.write(10, {}, 1.0, [], returns)
    logger.write(20, {}, 2.0, [], [4.0])  # a single return
    logger.close()
    first, second = histograms(read(tmp_path))
    # Rows: [from, to, count].
    assert first[:, 2].tolist() == [7] + [0] * (len(first) - 2) + [3]
    assert (first[0, 0], first[-1, 1]) == (0, 100)
    assert second[:, 2].sum() == 1


@pytest.mark.parametrize("returns", [[0.3, 0.1 + 0.2], [1e20], [-1e15, -1e15], [0.0, 5e-324]])
def test_returns_too_close_for_buckets_have_a_histogram(tmp_path, returns):
    (tmp_path / "run").mkdir()
    logger = Logger(tmp_path / "run", CARD)
    logger.write(10, {}, 1.0, [], returns)
    logger.close()
    [found] = histograms(read(tmp_path))
    assert found[:, 2].sum() == len(returns)


def test_at_most_one_histogram_per_second_is_written(tmp_path):
    (tmp_path / "run").mkdir()
    logger = Logger(tmp_path / "run", CARD)
    for step, seconds in ((10, 5.0), (20, 5.5), (30, 6.0), (40, 6.9), (50, 9.0)):
        logger.write(step, {"a": 1.0}, seconds, [], [float(step)])
    logger.close()
    found = read(tmp_path)
    assert [event.step for event in found.Tensors("run", "rollout/returns")] == [10, 30, 50]
    assert [step for step, _ in scalars(found, "a")] == [10, 20, 30, 40, 50]


def histograms(multiplexer):
    events = multiplexer.Tensors("run", "rollout/returns")
    return [tensor_util.make_ndarray(event.tensor_proto) for event in events]


def test_text_pages_show_command_and_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/steadyrl", "train"])
    write_run(tmp_path / "run")
    found = read(tmp_path)
    ((step, command),) = texts(found, "command")
    assert (step, command.strip()) == (0, f"steadyrl train {shlex.join(TYPED)}")
    ((_, configuration),) = texts(found, "configuration")
    assert configuration.startswith("```yaml\n") and "  learning_rate: 0.01\n" in configuration
    assert found.SummaryMetadata("run", "command").plugin_data.plugin_name == "text"


def sessions(folder):
    """Return the rows of the HParams page: hyper-parameters and metrics of each run."""
    context = Context(SimpleNamespace(data_provider=MultiplexerDataProvider(read(folder), "")))
    request = RequestContext()
    score = api_pb2.MetricName(tag="eval/return_mean")
    every = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_RUNNING],
        start_index=0,
        slice_size=100,
        col_params=[api_pb2.ColParams(metric=score)],
    )
    found = Handler(request, context, "", every).run()
    return {
        group.name: (
            dict(group.hparams),
            {value.name.tag: value.value for value in group.metric_values},
        )
        for group in found.session_groups
    }


def test_hparams_page_shows_settings_and_final_scores(tmp_path):
    write_run(tmp_path / "s3")
    write_run(
        tmp_path / "s4", RunInfo("s4", {**CONFIG, "seed": 4}, [*TYPED, "seed=4"]), steps=(10, 60)
    )
    found = sessions(tmp_path)
    assert set(found) == {"s3", "s4"}
    chosen, scores = found["s3"]
    assert {key: value.string_value or value.number_value for key, value in chosen.items()} == {
        "agent.name": "dqn", "env.id": "CartPole-v1", "seed": 3, "experiment": "fast",
        "agent.hidden": "[64,64]", "agent.learning_rate": 0.01,
    }  # fmt: skip
    assert scores["eval/return_mean"] == 10
    assert found["s4"][0]["seed"].number_value == 4
    assert found["s4"][1]["eval/return_mean"] == 30


def test_the_hparams_page_shows_long_and_exact_values_whole(tmp_path):
    path, rates = "/teachers/" + "deep/" * 20 + "policy", [0.123456789, 1e-07]
    config = {**CONFIG, "agent": {"name": "dqn", "teacher": path, "rates": rates}}
    typed = [f"agent.teacher={path}", "agent.rates=[0.123456789,1e-7]"]
    write_run(tmp_path / "s3", RunInfo("s3", config, typed))
    chosen, _ = sessions(tmp_path)["s3"]
    assert chosen["agent.teacher"].string_value == path
    assert chosen["agent.rates"].string_value == "[0.123456789,1e-07]"


@pytest.mark.parametrize("every", [10, 0])
def test_the_hparams_page_offers_returns_only(tmp_path, every):
    """TensorBoard ticks the first five of its metrics, in the order of the alphabet."""
    info = RunInfo("s3", {**CONFIG, "eval": {"every": every}}, TYPED)
    (tmp_path / "s3").mkdir()
    logger = Logger(tmp_path / "s3", info)
    metrics = {"memory/replay_fill": 0.1, "memory/rss_mb": 3.0, "rollout/return_mean": 7.0}
    evaluated = {"eval/return_mean": 5.0, "eval/return_std": 1.0} if every else {}
    logger.write(10, {**metrics, **evaluated}, 1.0)
    logger.close()
    context = Context(SimpleNamespace(data_provider=MultiplexerDataProvider(read(tmp_path), "")))
    found = context.experiment_from_metadata(
        RequestContext(), "", True, context.hparams_metadata(RequestContext(), ""), None
    )
    tags = [(metric.name.tag, metric.name.group) for metric in found.metric_infos]
    of_evaluation = [("eval/return_mean", ""), ("eval/return_std", "")] if every else []
    assert tags == [("episode/return", ""), *of_evaluation]
    assert scalars(read(tmp_path), "episode/return", "s3/eval" if every else "s3/returns")
    assert {"agent.name", "seed"} <= {info.name for info in found.hparam_infos}


def test_training_and_evaluation_share_the_first_tag_and_have_a_run_each(tmp_path):
    """A run has a colour, and tags stand in the order of the alphabet: this one chart is first."""
    (tmp_path / "run").mkdir()
    logger = Logger(tmp_path / "run", CARD)
    for step in (10, 20):
        metrics = {"memory/replay_fill": 0.1, "rollout/return_mean": float(step)}
        evaluated = {"eval/return_mean": step / 2} if step == 20 else {}
        logger.write(step, {**metrics, **evaluated}, 1.0)
    logger.close()
    found = read(tmp_path)
    tags = {run: content["tensors"] for run, content in found.Runs().items()}
    assert set(tags) == {"run", "run/eval"}
    pages = ("_hparams_", "command", "configuration", "custom_scalars__")
    shown = sorted(tag for of_run in tags.values() for tag in of_run if not tag.startswith(pages))
    assert shown[0] == "episode/return"
    assert scalars(found, "episode/return", "run") == [(10, 10), (20, 20)]
    assert scalars(found, "episode/return", "run/eval") == [(20, 10)]
    assert scalars(found, "rollout/return_mean") == [(10, 10), (20, 20)]
    assert scalars(found, "eval/return_mean") == [(20, 10)]


def test_runs_without_evaluations_have_no_run_of_evaluations(tmp_path):
    write_run(tmp_path / "run", RunInfo("s3", {**CONFIG, "eval": {"every": 0}}, TYPED), steps=())
    logger = Logger(tmp_path / "run", RunInfo("s3", {**CONFIG, "eval": {"every": 0}}, TYPED))
    logger.write(10, {"rollout/return_mean": 1.0}, 1.0)
    logger.close()
    assert not (tmp_path / "run" / "eval").exists()


def charts(folder):
    """Return the layout of the Custom Scalars page of a run."""
    found = read(folder)
    content = found.SummaryMetadata("run", "custom_scalars__config__").plugin_data.content
    layout = Layout.FromString(content)
    if not layout.category:  # some versions store it in the value
        (event,) = found.Tensors("run", "custom_scalars__config__")
        layout = Layout.FromString(tensor_util.make_ndarray(event.tensor_proto).item())
    return layout


def test_score_charts_come_before_memory_charts(tmp_path):
    write_run(tmp_path / "run")
    layout = charts(tmp_path)
    assert [category.title for category in layout.category] == list(CHARTS)
    assert next(iter(CHARTS)) == "score" and list(CHARTS)[-1] == "memory"
    assert layout.category[0].chart[0].multiline.tag[0] == "^rollout/return_mean$"


@pytest.mark.parametrize("names", [[], ["is_success"]])
def test_info_metrics_have_a_chart_if_configured(tmp_path, names):
    env = {**CONFIG["env"], "info_metrics": names}
    write_run(tmp_path / "run", RunInfo("s3", {**CONFIG, "env": env}, TYPED))
    titles = [chart.title for chart in charts(tmp_path).category[0].chart]
    assert ("reported by the environment" in titles) is bool(names)
    assert titles[0] == "return"


def test_a_resumed_run_has_one_history(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/steadyrl", "train"])
    write_run(tmp_path / "run", steps=(10, 20, 30))
    logger = Logger(tmp_path / "run", RunInfo("s3", CONFIG, ["resume=run"]))
    logger.continue_after(20)
    logger.write(25, {"eval/return_mean": 7.0}, 2.0, [(22, 8.0)], [8.0])
    logger.close()
    found = read(tmp_path)
    assert scalars(found, "eval/return_mean") == [(10, 5), (20, 10), (25, 7)]
    assert [step for step, _ in scalars(found, "rollout/return")] == [9, 10, 19, 20, 22]
    assert [event.step for event in found.Tensors("run", "rollout/returns")] == [10, 20, 25]
    assert [text for _, text in texts(found, "command")][-1].strip() == "steadyrl train resume=run"
    chosen, scores = sessions(tmp_path)["s3"]
    assert "experiment" in chosen and scores["eval/return_mean"] == 7


@pytest.mark.parametrize("every", [0, 10])
def test_a_run_that_begins_with_resume_auto_has_all_pages(tmp_path, every):
    (tmp_path / "run").mkdir()
    info = RunInfo("s3", {**CONFIG, "eval": {"every": every}}, TYPED)
    for step in (10, 20):
        logger = Logger(tmp_path / "run", info)
        logger.continue_after(step - 10)
        scores = {"rollout/return_mean": 1.0} | ({"eval/return_mean": 7.0} if every else {})
        logger.write(step, scores, 2.0)
        logger.close()
    assert [category.title for category in charts(tmp_path).category] == list(CHARTS)
    ((chosen, _),) = sessions(tmp_path).values()
    assert "experiment" in chosen
    rows = read(tmp_path).PluginRunToTagToContent("hparams")
    assert list(rows) == ["run/eval" if every else "run/returns"]


def test_a_resumed_run_has_one_history_despite_a_clock_set_back(tmp_path, monkeypatch):
    write_run(tmp_path / "run", steps=(10, 20, 30))
    clock = count(time.time() - 3600)
    monkeypatch.setattr("steadyrl.training.logging.tensorboard.time.time", lambda: next(clock))
    for step in (25, 40):
        logger = Logger(tmp_path / "run")
        logger.continue_after(20 if step == 25 else 25)
        logger.write(step, {"eval/return_mean": float(step)}, 2.0)
        logger.close()
    assert scalars(read(tmp_path), "eval/return_mean") == [(10, 5), (20, 10), (25, 25), (40, 40)]


def test_every_charted_tag_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    tags = [tag for charts in CHARTS.values() for tags in charts.values() for tag in tags]
    assert [tag for tag in tags if f"`{tag.replace('.*', '<name>')}`" not in page] == []


@pytest.mark.parametrize("broken_at", [1, 2, 3])
def test_text_pages_are_written_again_after_a_disk_error(tmp_path, monkeypatch, broken_at):
    from steadyrl.training.logging.tensorboard import EventFile

    calls = []
    original = EventFile.write

    def write(self, *events):
        calls.append(events)
        if len(calls) == broken_at:
            raise OSError(28, "No space left on device")
        original(self, *events)

    monkeypatch.setattr(EventFile, "write", write)
    write_run(tmp_path / "run")
    found = read(tmp_path)
    assert len(texts(found, "command")) == 1
    assert scalars(found, "eval/return_mean")[-1] == (20, 10)


def test_a_file_whose_first_write_fails_is_closed_and_removed(tmp_path, monkeypatch):
    streams = []

    def full(self, *events):
        streams.append(self._stream)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(EventFile, "write", full)
    with pytest.raises(OSError, match="No space left"):
        EventFile(tmp_path)
    assert streams[0].closed  # else Python 3.13 prints a traceback when it is collected
    assert not [*tmp_path.iterdir()]  # else each line logged while the disk is full leaves one
