"""What is filmed is what was played, and however long it is, it costs no memory."""

import os
from pathlib import Path

import numpy as np
import pytest
import toy_environments

from steadyrl.core.errors import SettingError
from steadyrl.envs.backends.single_env import episode_seed
from steadyrl.envs.factory import build_env, build_render_env
from steadyrl.envs.rendering.atari import AtariGame
from steadyrl.envs.rendering.video import PreviewWriter, VideoWriter, as_pixels
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.memory.process import MB


def settings(env_id="CartPole-v1", **changes):
    usual = {"num_envs": 4, "backend": "auto", "step_timeout": 60.0, "max_restarts": 3}
    return toy_environments.settings(env_id, **(usual | changes))


def shown(given, path=None, *, episodes=1, limit=1000):
    video = None if path is None else str(path)
    return given.for_rendering(video=video, episodes=episodes, max_episode_steps=limit)


def frames(path):
    av = pytest.importorskip("av")
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def numbered(i):
    """Return a picture whose upper half tells its number."""
    picture = np.zeros((240, 300, 3), np.uint8)
    picture[:120] = (i * 37) % 256
    return picture


@pytest.mark.parametrize(
    ("suffix", "fps"), [("mp4", 29.97), ("mp4", 125), ("gif", 125), ("gif", 4)]
)
def test_every_picture_is_in_the_film_and_in_order(tmp_path, suffix, fps):
    pytest.importorskip("av")
    film = VideoWriter(str(tmp_path / f"a.{suffix}"), fps=fps)
    for i in range(70):
        film.add(numbered(i))
    film.close()
    film.close()
    found = [int(frame[60, 150, 0]) for frame in frames(tmp_path / f"a.{suffix}")]
    assert np.abs(np.array(found) - [(i * 37) % 256 for i in range(70)]).max() <= 6


def test_a_film_has_its_name_once_it_is_whole(tmp_path):
    pytest.importorskip("av")
    film = VideoWriter(str(tmp_path / "a.mp4"), fps=30)
    film.add(numbered(0))
    assert not (tmp_path / "a.mp4").exists()
    with pytest.raises(ValueError, match="follows one of"):
        film.add(np.zeros((300, 240, 3)))
    film.close()
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_nothing_is_left_of_a_film_that_cannot_be_finished(tmp_path):
    pytest.importorskip("av")
    film = VideoWriter(str(tmp_path / "a.mp4"), fps=30)
    film.add(numbered(0))
    (tmp_path / "a.mp4").mkdir()
    (tmp_path / "a.mp4" / "in the way").touch()
    with pytest.raises(OSError):
        film.close()
    assert os.listdir(tmp_path) == ["a.mp4"]


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def test_a_long_film_takes_no_more_memory_than_a_short_one(tmp_path):
    pytest.importorskip("av")
    film = VideoWriter(str(tmp_path / "a.mp4"), fps=30)
    for i in range(100):
        film.add(numbered(i))
    before = resident()
    for i in range(400):  # 86 MB of pictures
        film.add(numbered(i))
    assert resident() - before < 20
    film.close()


def test_a_preview_is_small_however_long_the_film(tmp_path, monkeypatch):
    pytest.importorskip("av")
    monkeypatch.setattr(PreviewWriter, "LARGEST", 200_000)
    rng = np.random.default_rng(0)
    preview = PreviewWriter(str(tmp_path / "a.gif"), fps=30)
    for _ in range(200):  # noise, of which nothing can be left out
        preview.add(rng.integers(0, 256, (500, 520, 3), np.uint8))
    preview.close()
    assert 200_000 < (tmp_path / "a.gif").stat().st_size < 400_000
    shown = frames(tmp_path / "a.gif")
    assert shown[0].shape == (250, 260, 3)
    short = PreviewWriter(str(tmp_path / "b.gif"), fps=30)
    for i in range(9):
        short.add(numbered(i))
    short.close()
    assert len(frames(tmp_path / "b.gif")) == 5


def test_small_and_odd_pictures_are_made_fit_to_be_seen():
    boards = as_pixels(np.full((10, 10, 3), 0.5))
    assert boards.shape == (240, 240, 3) and boards.dtype == np.uint8 and set(boards.flat) == {128}
    assert as_pixels(np.zeros((241, 301, 3), np.uint8)).shape == (242, 302, 3)
    checks = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert np.array_equal(as_pixels(checks)[::120, ::120], checks)
    for wrong in (np.zeros((5, 5)), np.zeros((5, 5, 4)), np.zeros((0, 5, 3)), "text"):
        with pytest.raises(ValueError, match=r"is not \[height"):
            as_pixels(wrong)


def test_what_is_shown_is_what_evaluation_plays(tmp_path):
    """The first environment of an evaluation, with the same actions."""
    pytest.importorskip("av")
    given = settings()
    random = np.random.default_rng(0)
    with (
        build_env(given.for_evaluation(), seed=3, num_envs=4) as several,
        build_render_env(shown(given, tmp_path / "a.gif"), seed=3) as one,
    ):
        assert np.array_equal(several.reset()[:1], one.reset())
        over = False
        length = 0
        while not over:
            actions = random.integers(2, size=4)
            rows, row = several.step(actions), one.step(actions[:1])
            assert np.array_equal(rows.obs[:1], row.obs) and rows.reward[0] == row.reward[0]
            over = bool(row.terminated[0])
            length += 1
        assert (tmp_path / "a.gif").exists()  # before the environment is closed
        assert len(frames(tmp_path / "a.gif")) == length + 1


def test_an_episode_without_an_end_is_cut(tmp_path):
    pytest.importorskip("av")
    with build_render_env(shown(settings(), tmp_path / "a.mp4", limit=3), seed=0) as env:
        env.reset()
        for _ in range(5):
            env.step(np.array([0]))
    assert len(frames(tmp_path / "a.mp4")) == 4


def test_tables_are_filmed(tmp_path):
    pytest.importorskip("av")
    given = settings("FrozenLake-v1", kwargs={"map_name": "8x8"})
    with build_render_env(shown(given, tmp_path / "a.mp4", limit=2), seed=0) as env:
        env.reset()
        for _ in range(2):
            env.step(np.array([1]))
    assert [frame.std() > 1 for frame in frames(tmp_path / "a.mp4")] == [True] * 3


def test_the_game_on_the_screen_is_the_game_that_evaluation_plays():
    pytest.importorskip("ale_py")
    kwargs = {"repeat_action_probability": 0.25, "episodic_life": True, "noop_max": 30}
    given = settings("ALE/Breakout-v5", kwargs=kwargs)
    game = AtariGame(given.for_evaluation())
    random = np.random.default_rng(0)
    screens = set()
    with build_env(given.for_evaluation(), seed=3, num_envs=2) as env:
        first = env.reset()
        seen, _ = game.reset(seed=episode_seed(3, 0, 0))
        assert np.array_equal(first[0, 0], seen)
        for _ in range(120):
            actions = random.integers(4, size=2)
            row, (seen, reward, terminated, *_) = env.step(actions), game.step(actions[0])
            assert np.array_equal(row.obs[0, 0], seen)
            assert (row.reward[0], row.terminated[0]) == (reward, terminated)
            screens.add(game.render().tobytes())
            if terminated:
                break
    assert game.render().shape == (210, 160, 3) and len(screens) > 20


def test_a_keyword_for_pictures_is_no_hindrance(tmp_path):
    pytest.importorskip("av")
    given = settings("FrozenLake-v1", kwargs={"render_mode": "ansi"})
    with build_render_env(shown(given, tmp_path / "a.mp4", limit=1), seed=0) as env:
        env.reset()
        env.step(np.array([1]))
    assert len(frames(tmp_path / "a.mp4")) == 2


def test_what_draws_nothing_is_refused(tmp_path):
    with pytest.raises(SettingError, match="cannot render"):
        build_render_env(shown(settings(backend="envpool"), tmp_path / "a.mp4"), seed=0)
    given = settings("toy_environments:Counter-v0")
    with pytest.raises((SettingError, EnvironmentFailedError), match="cannot render"):
        build_render_env(shown(given, tmp_path / "a.mp4"), seed=0)
