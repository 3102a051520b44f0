"""Films during training: they are there, they change nothing, and nothing about them ends a run."""

import logging
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import warm
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from steadyrl.agents.base import Decision
from steadyrl.envs.settings import EnvSettings
from steadyrl.training.evaluation import video as filming
from steadyrl.training.evaluation.video import Filmer

FILMS = ("total_steps=600", "eval.every=0", "agent.learning_starts=100")


class Left:
    """An agent that pushes its cart to the left, and falls over."""

    def actor(self, num_envs, *, explore):
        assert explore is False
        return self

    def act(self, obs, starts):
        return Decision(torch.from_numpy(obs), torch.zeros(len(obs), dtype=torch.int64))


def filmer(path, env_id="CartPole-v1", every=100, limit=1000, **changes):
    values = dict(
        num_envs=2,
        backend="auto",
        frame_stack=1,
        kwargs={},
        wrappers=(),
        action_masks="false",
        image_axes="auto",
        image_range=None,
        step_timeout=60.0,
    )
    env = EnvSettings(id=env_id, max_restarts=3, info_metrics=(), **(values | changes))
    evaluation = SimpleNamespace(video_every=every, max_episode_steps=limit)
    return Filmer(SimpleNamespace(env=env, eval=evaluation), path, seed=0)


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
    monkeypatch.setattr(filming, "encoder_is_missing", lambda: True)
    shooting = filmer(tmp_path)
    assert shooting.next is None
    for step in (100, 200):
        shooting.shoot(Left(), step, lambda: False)
    assert said() == [
        "eval.video_every=100: there will be no videos: needs av to write videos, install it with: "
        'pip install -e ".[video]"'
    ]
    assert filmer(tmp_path, every=0).next is None and len(said()) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "envpool"}, "draw no pictures"),
        ({"env_id": "broken_envs:Broken-v0"}, "broken_envs"),
        ({"kwargs": {"g": 1}}, "no such keyword"),
    ],
)
def test_what_cannot_be_filmed_is_one_warning(tmp_path, said, monkeypatch, changes, reason):
    monkeypatch.setattr(filming, "encoder_is_missing", lambda: False)
    shooting = filmer(tmp_path, **changes)
    for step in (100, 150, 200):
        shooting.shoot(Left(), step, lambda: False)
    [warning] = said()
    assert warning.startswith("no video of step 100 (") and reason in warning
    assert warning.endswith("training goes on")


def test_a_full_disk_is_a_warning(tmp_path, said, monkeypatch):
    monkeypatch.setattr(filming, "encoder_is_missing", lambda: False)
    (tmp_path / "videos").touch()  # no directory can be made here
    filmer(tmp_path).shoot(Left(), 100, lambda: False)
    [warning] = said()
    assert "FileExistsError" in warning


def test_it_films_at_crossings_and_goes_on_where_a_run_does(tmp_path, monkeypatch):
    monkeypatch.setattr(filming, "encoder_is_missing", lambda: False)
    shooting = filmer(tmp_path)
    shot = []
    monkeypatch.setattr(shooting, "_film", lambda agent, path, stopped: shot.append(path.name))
    for step in (99, 103, 198, 305):
        shooting.shoot(Left(), step, lambda: False)
    assert shot == ["step-000000000103.mp4", "step-000000000305.mp4"]
    shooting.continue_at(103)
    assert shooting.next == 200


def test_a_run_that_is_asked_to_stop_waits_for_no_film(tmp_path):
    pytest.importorskip("av")
    asked = iter([False, False, True])
    filmer(tmp_path).shoot(Left(), 100, lambda: next(asked))
    assert names(tmp_path) == []


def test_the_film_is_of_the_first_episode_of_every_evaluation(tmp_path):
    av = pytest.importorskip("av")
    shooting = filmer(tmp_path, limit=5)
    for step in (100, 200):
        shooting.shoot(Left(), step, lambda: False)
    films = []
    for path in sorted(tmp_path.glob("videos/*")):
        with av.open(str(path)) as container:
            films.append([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert np.array_equal(films[0], films[1]) and len(films[0]) == 6
