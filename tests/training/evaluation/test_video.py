"""Videos during training: recorded at crossings, without effect on the run; failures warn only."""

import fcntl
import logging
import signal
from contextlib import ExitStack
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toy_environments
import warm
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from steadyrl.agents.base import Decision
from steadyrl.envs.rendering.video import VideoWriter
from steadyrl.training.evaluation import video as filming
from steadyrl.training.evaluation.video import VideoRecorder

RUN = ("total_steps=600", "eval.every=0", "agent.learning_starts=100")


class Left:
    """An agent that always pushes the cart to the left."""

    def actor(self, num_envs, *, explore):
        assert explore is False
        return self

    def act(self, obs, episode_starts):
        return Decision(torch.from_numpy(obs), torch.zeros(len(obs), dtype=torch.int64))


def video_recorder(path, env_id="CartPole-v1", every=100, limit=1000, **changes):
    defaults = {"num_envs": 2, "backend": "auto", "step_timeout": 60.0, "max_restarts": 3}
    env = toy_environments.settings(env_id, **(defaults | changes))
    evaluation = SimpleNamespace(video_every=every, max_episode_steps=limit)
    return VideoRecorder(SimpleNamespace(env=env, eval=evaluation), path, seed=0)


@pytest.fixture
def warnings(caplog, monkeypatch):
    """Return the warnings."""
    monkeypatch.setattr(logging.getLogger("steadyrl"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def names(path):
    return sorted(each.name for each in path.glob("videos/*"))


def test_recording_videos_does_not_change_the_run(tmp_path):
    av = pytest.importorskip("av")
    plain, plain_summary, _ = warm.run(tmp_path, *RUN)
    filmed, summary, _ = warm.run(tmp_path, *RUN, "eval.video_every=300")
    assert summary["weights_sha256"] == plain_summary["weights_sha256"]
    assert names(plain) == []
    assert names(filmed) == ["step-000000000300.mp4", "step-000000000600.mp4"]
    events = EventAccumulator(str(filmed / "eval")).Reload().Images("eval/film")
    assert [event.step for event in events] == [300, 600]
    for event in events:
        assert event.encoded_image_string.startswith(b"GIF89a")
        assert (event.width, event.height) == (600, 400)
        with av.open(BytesIO(event.encoded_image_string)) as container:
            assert len(list(container.decode(video=0))) > 4  # every second frame
    for path in filmed.glob("videos/*"):
        with av.open(str(path)) as container:
            assert len(list(container.decode(video=0))) > 8  # episodes have more than 8 steps


def test_a_missing_video_extra_is_warned_of_once(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: True)
    recorder = video_recorder(tmp_path)
    assert recorder.next is None
    for step in (100, 200):
        recorder.maybe_record(Left(), step, lambda: False)
    assert warnings() == [
        "eval.video_every=100: no videos will be recorded: needs av to write videos, install it "
        "with: "
        'pip install -e ".[video]"'
    ]
    assert video_recorder(tmp_path, every=0).next is None and len(warnings()) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "envpool"}, "cannot render"),
        ({"env_id": "broken_envs:Broken-v0"}, "broken_envs"),
        ({"kwargs": {"g": 1}}, "no such keyword"),
    ],
)
def test_environments_that_cannot_be_recorded_are_warned_of_once(
    tmp_path, warnings, monkeypatch, changes, reason
):
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: False)
    recorder = video_recorder(tmp_path, **changes)
    for step in (100, 150, 200):
        recorder.maybe_record(Left(), step, lambda: False)
    [warning] = warnings()
    assert warning.startswith("no video of step 100 (") and reason in warning
    assert warning.endswith("Training continues.")


@pytest.mark.parametrize("fault", ["render", "reward"])
def test_the_film_of_an_episode_that_failed_is_removed(tmp_path, warnings, fault):
    pytest.importorskip("av")
    recorder = video_recorder(tmp_path, "filmed_env:Torn-v0", kwargs={"fault": fault})
    recorder.maybe_record(Left(), 100, lambda: False)
    [warning] = warnings()
    assert warning.startswith("no video of step 100 (")
    assert list((tmp_path / "videos").iterdir()) == []


def test_an_unwritable_video_directory_is_a_warning(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: False)
    (tmp_path / "videos").touch()  # so the directory cannot be created
    video_recorder(tmp_path).maybe_record(Left(), 100, lambda: False)
    [warning] = warnings()
    assert "FileExistsError" in warning


def test_building_the_environment_and_its_steps_are_timed(tmp_path, monkeypatch):
    """So that a signal waits for them, as for the environments of training."""
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: False)
    recorder, running = video_recorder(tmp_path), []

    def build(*_, **__):
        running.append(recorder.clock.running)
        return ExitStack()  # an environment that does nothing

    def play(env, *_, **__):
        running.append(recorder.clock.running)
        with env.clock:
            running.append(recorder.clock.running)

    monkeypatch.setattr(filming, "build_render_env", build)
    monkeypatch.setattr(filming, "play", play)
    recorder.maybe_record(Left(), 100, lambda: True)
    building, between, stepping = running
    assert building > 0 and between == 0 and stepping > 0
    assert recorder.clock.slowest > 0


def test_videos_are_recorded_at_crossings_and_after_resuming(tmp_path, monkeypatch):
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: False)
    recorder = video_recorder(tmp_path)
    videos = tmp_path / "videos"
    videos.mkdir()
    monkeypatch.setattr(recorder, "_film", lambda agent, path, stopped: path.touch())
    for step in (99, 103, 198, 305):
        recorder.maybe_record(Left(), step, lambda: False)
    assert names(tmp_path) == ["step-000000000103.mp4", "step-000000000305.mp4"]
    # The checkpoint of step 103 was written before its video, and may be the last one.
    for step, due in ((0, 100), (99, 100), (103, 100), (104, 200), (199, 200), (305, 300)):
        recorder.continue_at(step)
        assert recorder.next == due
    (videos / "step-000000000103.mp4").unlink()
    recorder.continue_at(104)
    assert recorder.next == 100


@pytest.mark.parametrize("every", [0, 100])
def test_unfinished_videos_of_a_killed_run_are_removed(tmp_path, monkeypatch, every):
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: False)
    videos = tmp_path / "videos"
    videos.mkdir()
    finished = [videos / name for name in ("step-000000000100.mp4", "mine.gif")]
    unfinished = [videos / f".unfinished-77-{name}" for name in ("step-1.mp4", ".step-1.gif")]
    for path in (*finished, *unfinished, videos / ".step-000000000100.gif"):
        path.touch()
    locked = (videos / ".unfinished-78-step-2.mp4").open("w")
    fcntl.flock(locked, fcntl.LOCK_EX)
    video_recorder(tmp_path, every=every).continue_at(150)
    remaining = {path.name for path in videos.iterdir()}
    assert remaining == {".unfinished-78-step-2.mp4", *(path.name for path in finished)}
    locked.close()


def test_a_video_replaces_its_own_unfinished_file(tmp_path):
    pytest.importorskip("av")
    unfinished = [tmp_path / f".unfinished-77-{name}.mp4" for name in ("a[1]", "other")]
    for path in unfinished:
        path.touch()
    writer = VideoWriter(str(tmp_path / "a[1].mp4"), fps=30)
    writer.add(np.zeros((240, 240, 3), np.uint8))
    assert [path.exists() for path in unfinished] == [False, True]
    writer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"a[1].mp4", unfinished[1].name}


def test_a_video_lost_by_a_kill_is_recorded_after_resuming(tmp_path):
    pytest.importorskip("av")
    arguments = (
        *RUN, "env.id=filmed_env:Filmed-v0", f"env.kwargs.mark={tmp_path}/mark",
        "env.num_envs=8", "eval.video_every=299", "checkpoint.every=299", "run_dir=run",
    )  # fmt: skip
    process = warm.start(tmp_path, *arguments)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    hidden = [path.name for path in (tmp_path / "run" / "videos").glob(".*")]
    assert any(name.startswith(".unfinished-") for name in hidden)
    (step,) = {int(name.split("-")[-1].partition(".")[0]) for name in hidden}
    assert step % 299 != 0, "otherwise the checkpoint's step alone would make the video due"
    warm.run(tmp_path, *arguments, "resume=auto")
    first, second = names(tmp_path / "run")
    assert first == f"step-{step:012d}.mp4" < second
