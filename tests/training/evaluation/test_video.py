"""Films during training: they are there, they change nothing, and nothing about them ends a run."""

import fcntl
import logging
import signal
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

FILMS = ("total_steps=600", "eval.every=0", "agent.learning_starts=100")


class Left:
    """An agent that pushes its cart to the left, and falls over."""

    def actor(self, num_envs, *, explore):
        assert explore is False
        return self

    def act(self, obs, episode_starts):
        return Decision(torch.from_numpy(obs), torch.zeros(len(obs), dtype=torch.int64))


def video_recorder(path, env_id="CartPole-v1", every=100, limit=1000, **changes):
    usual = {"num_envs": 2, "backend": "auto", "step_timeout": 60.0, "max_restarts": 3}
    env = toy_environments.settings(env_id, **(usual | changes))
    evaluation = SimpleNamespace(video_every=every, max_episode_steps=limit)
    return VideoRecorder(SimpleNamespace(env=env, eval=evaluation), path, seed=0)


@pytest.fixture
def said(caplog, monkeypatch):
    """Return the warnings."""
    monkeypatch.setattr(logging.getLogger("steadyrl"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def names(path):
    return sorted(each.name for each in path.glob("videos/*"))


def test_a_run_is_filmed_and_is_the_run_it_would_have_been(tmp_path):
    av = pytest.importorskip("av")
    plain, without, _ = warm.run(tmp_path, *FILMS)
    filmed, summary, _ = warm.run(tmp_path, *FILMS, "eval.video_every=300")
    assert summary["weights_sha256"] == without["weights_sha256"]
    assert names(plain) == []
    assert names(filmed) == ["step-000000000300.mp4", "step-000000000600.mp4"]
    shown = EventAccumulator(str(filmed)).Reload().Images("eval/film")
    assert [event.step for event in shown] == [300, 600]
    for event in shown:
        assert event.encoded_image_string.startswith(b"GIF89a")
        assert (event.width, event.height) == (600, 400)
        with av.open(BytesIO(event.encoded_image_string)) as container:
            assert len(list(container.decode(video=0))) > 4  # every second picture
    for path in filmed.glob("videos/*"):
        with av.open(str(path)) as container:
            assert len(list(container.decode(video=0))) > 8  # no pole falls sooner


def test_the_extra_that_is_missing_is_one_warning(tmp_path, said, monkeypatch):
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: True)
    shooting = video_recorder(tmp_path)
    assert shooting.next is None
    for step in (100, 200):
        shooting.maybe_record(Left(), step, lambda: False)
    assert said() == [
        "eval.video_every=100: no videos will be recorded: needs av to write videos, install it "
        "with: "
        'pip install -e ".[video]"'
    ]
    assert video_recorder(tmp_path, every=0).next is None and len(said()) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "envpool"}, "cannot render"),
        ({"env_id": "broken_envs:Broken-v0"}, "broken_envs"),
        ({"kwargs": {"g": 1}}, "no such keyword"),
    ],
)
def test_what_cannot_be_filmed_is_one_warning(tmp_path, said, monkeypatch, changes, reason):
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: False)
    shooting = video_recorder(tmp_path, **changes)
    for step in (100, 150, 200):
        shooting.maybe_record(Left(), step, lambda: False)
    [warning] = said()
    assert warning.startswith("no video of step 100 (") and reason in warning
    assert warning.endswith("Training continues.")


def test_a_full_disk_is_a_warning(tmp_path, said, monkeypatch):
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: False)
    (tmp_path / "videos").touch()  # no directory can be made here
    video_recorder(tmp_path).maybe_record(Left(), 100, lambda: False)
    [warning] = said()
    assert "FileExistsError" in warning


def test_it_films_at_crossings_and_goes_on_where_a_run_does(tmp_path, monkeypatch):
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: False)
    shooting = video_recorder(tmp_path)
    videos = tmp_path / "videos"
    videos.mkdir()
    monkeypatch.setattr(shooting, "_film", lambda agent, path, stopped: path.touch())
    for step in (99, 103, 198, 305):
        shooting.maybe_record(Left(), step, lambda: False)
    assert names(tmp_path) == ["step-000000000103.mp4", "step-000000000305.mp4"]
    # The checkpoint of step 103 was written before its film was, and may be all there is.
    for step, due in ((0, 100), (99, 100), (103, 100), (104, 200), (199, 200), (305, 300)):
        shooting.continue_at(step)
        assert shooting.next == due
    (videos / "step-000000000103.mp4").unlink()
    shooting.continue_at(104)
    assert shooting.next == 100


@pytest.mark.parametrize("every", [0, 100])
def test_what_a_killed_run_had_begun_to_film_is_removed(tmp_path, monkeypatch, every):
    monkeypatch.setattr(filming, "video_encoder_missing", lambda: False)
    videos = tmp_path / "videos"
    videos.mkdir()
    kept = [videos / name for name in ("step-000000000100.mp4", "mine.gif")]
    begun = [videos / f".unfinished-77-{name}" for name in ("step-1.mp4", ".step-1.gif")]
    for path in (*kept, *begun, videos / ".step-000000000100.gif"):
        path.touch()
    lives = (videos / ".unfinished-78-step-2.mp4").open("w")
    fcntl.flock(lives, fcntl.LOCK_EX)
    video_recorder(tmp_path, every=every).continue_at(150)
    left = {path.name for path in videos.iterdir()}
    assert left == {".unfinished-78-step-2.mp4", *(path.name for path in kept)}
    lives.close()


def test_a_film_removes_what_a_killed_process_left_of_it(tmp_path):
    pytest.importorskip("av")
    begun = [tmp_path / f".unfinished-77-{name}.mp4" for name in ("a[1]", "other")]
    for path in begun:
        path.touch()
    film = VideoWriter(str(tmp_path / "a[1].mp4"), fps=30)
    film.add(np.zeros((240, 240, 3), np.uint8))
    assert [path.exists() for path in begun] == [False, True]
    film.close()
    assert {path.name for path in tmp_path.iterdir()} == {"a[1].mp4", begun[1].name}


def test_the_film_that_a_kill_cut_short_is_there_once_the_run_went_on(tmp_path):
    pytest.importorskip("av")
    arguments = (
        *FILMS, "env.id=filmed_env:Filmed-v0", f"env.kwargs.mark={tmp_path}/mark",
        "env.num_envs=8", "eval.video_every=299", "checkpoint.every=299", "run_dir=run",
    )  # fmt: skip
    process = warm.start(tmp_path, *arguments)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    hidden = [path.name for path in (tmp_path / "run" / "videos").glob(".*")]
    assert any(name.startswith(".unfinished-") for name in hidden)
    (step,) = {int(name.split("-")[-1].partition(".")[0]) for name in hidden}
    assert step % 299 != 0, "its checkpoint would say by itself that it is due"
    warm.run(tmp_path, *arguments, "resume=auto")
    first, second = names(tmp_path / "run")
    assert first == f"step-{step:012d}.mp4" < second
