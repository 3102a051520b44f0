"""The parts around a run that it reports through and listens to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from agents.base import Agent
from agents.world import ALONE, World
from memory.watch import MemoryWatch
from training.evaluation import Evaluation
from training.filming import Filmer
from training.logger import Logger
from training.run_directory import RunDirectory
from training.saving import Saver
from training.signals import StopSignals
from training.terminal import Bar, Lines


class Scoring(Protocol):
    """Who evaluates."""

    def run(self, agent: Agent, stopped: Callable[[], bool]) -> Evaluation | None:
        """Return the agent's greedy score, or None when stopped before it is known."""


class Instruments(NamedTuple):
    """What a run reports through and listens to."""

    directory: RunDirectory
    logger: Logger
    progress: Bar | Lines
    evaluator: Scoring | None
    signals: StopSignals
    watch: MemoryWatch
    saver: Saver
    filmer: Filmer
    world: World = ALONE
