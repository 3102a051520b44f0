"""Videos of greedy episodes during training; errors are logged and never stop the run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from steadyrl.agents.base import Agent
from steadyrl.core.clock import Interval, doing
from steadyrl.core.errors import ExpectedError, describe
from steadyrl.envs.factory import build_render_env
from steadyrl.envs.rendering.video import how_to_install, remove_unfinished, video_encoder_missing
from steadyrl.envs.settings import RenderSettings
from steadyrl.envs.step_clock import StepClock
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.config.settings import RunSettings
from steadyrl.training.evaluation.evaluator import play

log = logging.getLogger("steadyrl")

FILM = re.compile(r"step-(\d+)\.mp4")
PREVIEW = ".step-*.gif"


def _films(folder: Path) -> list[int]:
    """Return the steps of the complete videos in a folder."""
    found = (FILM.fullmatch(path.name) for path in folder.glob("step-*.mp4"))
    return [int(match[1]) for match in found if match]


def _remove_unfinished(folder: Path) -> None:
    """Remove the partial videos of a killed run."""
    remove_unfinished(folder)
    for preview in folder.glob(PREVIEW):
        preview.unlink(missing_ok=True)


class VideoRecorder:
    """Record one greedy episode to `videos/step-….mp4` every `eval.video_every` steps.

    Environment, renderer and encoder live in a process that exits after each video.
    """

    def __init__(self, settings: RunSettings, directory: Path, *, seed: int) -> None:
        self._env, self._limit = settings.env, settings.eval.max_episode_steps
        self._directory = directory / "videos"
        self._seed = seed
        self._warned = False
        self._every = every = settings.eval.video_every
        if every and video_encoder_missing():
            log.warning(
                "eval.video_every=%d: no videos will be recorded: %s", every, how_to_install()
            )
            every = 0
        self._due = Interval(every)
        self.clock = StepClock()  # of building the environment, and of its steps

    @property
    def next(self) -> int | None:
        """The step of the next video; None without videos."""
        return self._due.next

    def continue_at(self, step: int) -> None:
        """Set the next video after resuming at `step`.

        A checkpoint is written before the video of its step, so that video may be recorded again.
        """
        self._due.next = self._next_after_resume(step)

    def _next_after_resume(self, step: int) -> int | None:
        """Remove partial videos; return the step of the next one."""
        films: list[int] = []
        with suppress(OSError):  # a disk error here will show again at the next video
            _remove_unfinished(self._directory)
            films = _films(self._directory)
        if self._due.next is None:
            return None
        due = step // self._every * self._every
        if due == 0 or any(due <= film < step for film in films):
            due += self._every
        return due

    def maybe_record(self, agent: Agent, step: int, stopped: Callable[[], bool]) -> bytes | None:
        """Record an episode if one is due and return its GIF preview; errors are logged once."""
        if not self._due.pop_due(step):
            return None
        try:
            return self._film(agent, self._directory / f"step-{step:012d}.mp4", stopped)
        except Exception as error:  # displays, drivers, disks, environments: any exception
            log.debug("no video of step %d", step, exc_info=True)
            if not self._warned:
                reason = str(error) if isinstance(error, ExpectedError) else describe(error)
                log.warning("no video of step %s (%s). Training continues.", f"{step:,}", reason)
            self._warned = True
            return None

    def _build(self, settings: RenderSettings) -> VectorEnv:
        with self.clock:
            env = build_render_env(settings, seed=self._seed)
        env.clock = self.clock
        return env

    def _film(self, agent: Agent, path: Path, stopped: Callable[[], bool]) -> bytes | None:
        path.parent.mkdir(exist_ok=True)
        preview = path.with_name(f".{path.stem}.gif")
        settings = self._env.for_rendering(
            video=str(path), episodes=1, max_episode_steps=self._limit, preview=str(preview)
        )
        whole = None
        try:
            with doing("recording a video"), self._build(settings) as env:
                actor = agent.actor(1, explore=False)
                whole = play(env, actor, [1], max_episode_steps=self._limit, stopped=stopped)
            return None if whole is None else preview.read_bytes()
        finally:
            preview.unlink(missing_ok=True)
            if whole is None:
                path.unlink(missing_ok=True)
