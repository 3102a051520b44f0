"""Videos show the evaluation's episodes, with bounded memory and file size."""

import os
import resource
import subprocess
import sys
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
    defaults = {"num_envs": 4, "backend": "auto", "step_timeout": 60.0, "max_restarts": 3}
    return toy_environments.settings(env_id, **(defaults | changes))


def rendered(config, path=None, *, episodes=1, limit=1000):
    video = None if path is None else str(path)
    return config.for_rendering(video=video, episodes=episodes, max_episode_steps=limit)


def frames(path):
    av = pytest.importorskip("av")
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def numbered_frame(i):
    """Return a frame whose upper half encodes its number."""
    frame = np.zeros((240, 300, 3), np.uint8)
    frame[:120] = (i * 37) % 256
    return frame


@pytest.mark.parametrize(
    ("suffix", "fps"), [("mp4", 29.97), ("mp4", np.float32(125)), ("gif", 125), ("gif", 4)]
)
def test_a_video_has_every_frame_in_order(tmp_path, suffix, fps):
    pytest.importorskip("av")
    writer = VideoWriter(str(tmp_path / f"a.{suffix}"), fps=fps)
    for i in range(70):
        writer.add(numbered_frame(i))
    writer.close()
    writer.close()
    found = [int(frame[60, 150, 0]) for frame in frames(tmp_path / f"a.{suffix}")]
    assert np.abs(np.array(found) - [(i * 37) % 256 for i in range(70)]).max() <= 6


def test_mujoco_that_the_trainer_has_imported_draws_without_a_display(tmp_path, monkeypatch):
    pytest.importorskip("av")
    pytest.importorskip("mujoco")
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    egl = [sys.executable, "-c", "from mujoco.egl import GLContext; GLContext(8, 8)"]
    if subprocess.run(egl, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("EGL does not work here")
    path = tmp_path / "ball.mp4"
    ball = settings("own_mujoco:Ball-v0", backend="sync")
    build_env(ball, seed=0).close()
    with build_render_env(rendered(ball, path), seed=1) as env:
        env.reset()
        for _ in range(3):
            env.step(np.zeros(1, np.int64))
    assert len(frames(path)) == 4


def test_a_video_gets_its_name_when_complete(tmp_path):
    pytest.importorskip("av")
    writer = VideoWriter(str(tmp_path / "a.mp4"), fps=30)
    writer.add(numbered_frame(0))
    assert not (tmp_path / "a.mp4").exists()
    with pytest.raises(ValueError, match="follows one of"):
        writer.add(np.zeros((300, 240, 3)))
    writer.close()
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_a_video_that_fails_to_close_leaves_no_files(tmp_path):
    pytest.importorskip("av")
    writer = VideoWriter(str(tmp_path / "a.mp4"), fps=30)
    writer.add(numbered_frame(0))
    (tmp_path / "a.mp4").mkdir()
    (tmp_path / "a.mp4" / "in the way").touch()
    with pytest.raises(OSError):
        writer.close()
    assert os.listdir(tmp_path) == ["a.mp4"]


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_a_disk_error_is_the_films_and_not_the_environments(tmp_path, suffix):
    pytest.importorskip("av")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # of its process, too
    refused = r"^video=\S+: cannot be written: File too large"
    try:
        with (
            build_render_env(rendered(settings(), tmp_path / f"a.{suffix}"), seed=3) as env,
            pytest.raises(SettingError, match=refused),
        ):
            env.reset()
            for _ in range(500):
                env.step(np.zeros(1, np.int64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def test_video_memory_does_not_grow_with_length(tmp_path):
    pytest.importorskip("av")
    writer = VideoWriter(str(tmp_path / "a.mp4"), fps=30)
    for i in range(100):
        writer.add(numbered_frame(i))
    before = resident()
    for i in range(400):  # 86 MB of frames
        writer.add(numbered_frame(i))
    assert resident() - before < 20
    writer.close()


def test_previews_are_small_for_any_length(tmp_path, monkeypatch):
    pytest.importorskip("av")
    monkeypatch.setattr(PreviewWriter, "LARGEST", 200_000)
    rng = np.random.default_rng(0)
    preview = PreviewWriter(str(tmp_path / "a.gif"), fps=30)
    for _ in range(200):  # noise cannot be compressed
        preview.add(rng.integers(0, 256, (500, 520, 3), np.uint8))
    preview.close()
    assert 200_000 < (tmp_path / "a.gif").stat().st_size < 400_000
    rendered = frames(tmp_path / "a.gif")
    assert rendered[0].shape == (250, 260, 3)
    short = PreviewWriter(str(tmp_path / "b.gif"), fps=30)
    for i in range(9):
        short.add(numbered_frame(i))
    short.close()
    assert len(frames(tmp_path / "b.gif")) == 5


def test_small_and_odd_frames_are_scaled_and_padded():
    boards = as_pixels(np.full((10, 10, 3), 0.5))
    assert boards.shape == (240, 240, 3) and boards.dtype == np.uint8 and set(boards.flat) == {128}
    assert as_pixels(np.zeros((241, 301, 3), np.uint8)).shape == (242, 302, 3)
    checks = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert np.array_equal(as_pixels(checks)[::120, ::120], checks)
    for wrong in (np.zeros((5, 5)), np.zeros((5, 5, 4)), np.zeros((0, 5, 3)), "text"):
        with pytest.raises(ValueError, match=r"is not \[height"):
            as_pixels(wrong)


def test_rendered_steps_equal_the_evaluations(tmp_path):
    """The first environment of an evaluation, with the same actions."""
    pytest.importorskip("av")
    config = settings()
    random = np.random.default_rng(0)
    with (
        build_env(config.for_evaluation(), seed=3, num_envs=4) as several,
        build_render_env(rendered(config, tmp_path / "a.gif"), seed=3) as one,
    ):
        assert np.array_equal(several.reset()[:1], one.reset())
        over = False
        length = 0
        while not over:
            actions = random.integers(2, size=4)
            steps, step = several.step(actions), one.step(actions[:1])
            assert np.array_equal(steps.obs[:1], step.obs) and steps.reward[0] == step.reward[0]
            over = bool(step.terminated[0])
            length += 1
        assert (tmp_path / "a.gif").exists()  # written before the environment is closed
        assert len(frames(tmp_path / "a.gif")) == length + 1


def test_endless_episodes_are_cut_in_the_video(tmp_path):
    pytest.importorskip("av")
    with build_render_env(rendered(settings(), tmp_path / "a.mp4", limit=3), seed=0) as env:
        env.reset()
        for _ in range(5):
            env.step(np.array([0]))
    assert len(frames(tmp_path / "a.mp4")) == 4


def test_grid_worlds_are_rendered(tmp_path):
    pytest.importorskip("av")
    config = settings("FrozenLake-v1", kwargs={"map_name": "8x8"})
    with build_render_env(rendered(config, tmp_path / "a.mp4", limit=2), seed=0) as env:
        env.reset()
        for _ in range(2):
            env.step(np.array([1]))
    assert [frame.std() > 1 for frame in frames(tmp_path / "a.mp4")] == [True] * 3


def test_rendered_atari_games_equal_the_evaluations():
    pytest.importorskip("ale_py")
    kwargs = {"repeat_action_probability": 0.25, "episodic_life": True, "noop_max": 30}
    config = settings("ALE/Breakout-v5", kwargs=kwargs)
    game = AtariGame(config.for_evaluation())
    random = np.random.default_rng(0)
    screens = set()
    with build_env(config.for_evaluation(), seed=3, num_envs=2) as env:
        first = env.reset()
        seen, _ = game.reset(seed=episode_seed(3, 0, 0))
        assert np.array_equal(first[0, 0], seen)
        for _ in range(600):
            actions = np.array([0, random.integers(4)])  # of itself the first never presses FIRE
            step, (seen, reward, terminated, *_) = env.step(actions), game.step(actions[0])
            assert np.array_equal(step.obs[0, 0], seen)
            assert (step.reward[0], step.terminated[0]) == (reward, terminated)
            screens.add(game.render().tobytes())
            if terminated:
                break
    assert terminated and game.render().shape == (210, 160, 3) and len(screens) > 20


def test_a_configured_render_mode_is_overridden(tmp_path):
    pytest.importorskip("av")
    config = settings("FrozenLake-v1", kwargs={"render_mode": "ansi"})
    with build_render_env(rendered(config, tmp_path / "a.mp4", limit=1), seed=0) as env:
        env.reset()
        env.step(np.array([1]))
    assert len(frames(tmp_path / "a.mp4")) == 2


def test_an_environment_without_render_is_rejected(tmp_path, monkeypatch):
    monkeypatch.delattr("gymnasium.envs.toy_text.frozen_lake.FrozenLakeEnv.render")
    config = rendered(settings("FrozenLake-v1"), tmp_path / "a.mp4")
    why = r"cannot render: it has no render\(\)"
    with build_render_env(config, seed=0) as env, pytest.raises(SettingError, match=why):
        env.reset()


def test_an_environments_own_words_for_why_it_cannot_render_are_shown(tmp_path, monkeypatch):
    def render(self):
        raise NotImplementedError("needs libGL.so.1")

    monkeypatch.setattr("gymnasium.envs.toy_text.frozen_lake.FrozenLakeEnv.render", render)
    config = rendered(settings("FrozenLake-v1"), tmp_path / "a.mp4")
    why = r"cannot render: needs libGL.so.1"
    with build_render_env(config, seed=0) as env, pytest.raises(SettingError, match=why):
        env.reset()


def test_environments_that_cannot_render_are_rejected(tmp_path):
    with pytest.raises(SettingError, match="cannot render"):
        build_render_env(rendered(settings(backend="envpool"), tmp_path / "a.mp4"), seed=0)
    why = "cannot render: it cannot be made with render_mode='rgb_array'"
    for name, modes in (("Counter", ""), ("Asserting", ", it has 'human' and 'ansi'")):
        config = settings(f"toy_environments:{name}-v0")
        with pytest.raises((SettingError, EnvironmentFailedError), match=why + modes):
            build_render_env(rendered(config, tmp_path / "a.mp4"), seed=0)
