"""The parts around a run that it reports through and listens to."""

from __future__ import annotations

from typing import NamedTuple

from memory.watch import MemoryWatch
from training.evaluation import Evaluator
from training.filming import Filmer
from training.logger import Logger
from training.run_directory import RunDirectory
from training.saving import Saver
from training.signals import StopSignals
from training.terminal import Bar, Lines


class Instruments(NamedTuple):
    """What a run reports through and listens to."""

    directory: RunDirectory
    logger: Logger
    progress: Bar | Lines
    evaluator: Evaluator | None
    signals: StopSignals
    watch: MemoryWatch
    saver: Saver
    filmer: Filmer
