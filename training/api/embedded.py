"""Train inside another program (`steadyrl.train`), whose process stays as it was.

A run of the command owns its process: it handles signals, and sets up torch and malloc. Here it
installs nothing, and settings that it changes are restored at its end.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase

from steadyrl.core.errors import CommandError
from steadyrl.envs.arithmetic import flush_subnormals, flushes_subnormals
from steadyrl.training.callbacks.callback import Callback
from steadyrl.training.callbacks.runner import given_callbacks
from steadyrl.training.cli.arguments import read
from steadyrl.training.cli.failures import out_of_memory
from steadyrl.training.cli.main import composing
from steadyrl.training.cli.start import working_directory
from steadyrl.training.config.overrides import override_list
from steadyrl.training.config.settings import Job
from steadyrl.training.run.job import accept, compose_one
from steadyrl.training.run.rank_info import rank_info

if TYPE_CHECKING:
    from steadyrl.training.run.services import RunResult


GUARD = (
    "a process of a run imports this script again (on macOS, or once a GPU is in use): put what "
    'the script does below `if __name__ == "__main__":`'
)

COMPOSING = Lock()  # Hydra has one configuration per process: threads wait for each other


def train_embedded(
    train: Callable[[Job], RunResult],
    overrides: Sequence[str],
    *,
    callbacks: Sequence[Callback],
    quiet: bool,
) -> RunResult:
    """Train as `overrides` say and return the result; raise ExpectedError where the command exits.

    Bugs keep their own exception.
    """
    validate_not_imported_again()
    try:
        given = given_callbacks(callbacks)
        job = _job(overrides)
        job = job._replace(own_process=False, quiet=quiet, callbacks=(*job.callbacks, *given))
        with unchanged_process():
            return train(job)
    except (MemoryError, OSError, RuntimeError) as error:
        full = out_of_memory(error)
        if full is None:
            raise
        raise full from error


def validate_not_imported_again() -> None:
    """Raise CommandError in a process that starts: it would train, or evaluate, all over again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing asks
        raise CommandError(GUARD)


def _job(overrides: Sequence[str]) -> Job:
    overrides = override_list("overrides", overrides, "env=cartpole")
    if rank_info().size > 1:
        raise CommandError("steadyrl.train trains in one process; start ranks with the command")
    arguments = read(overrides)
    if not arguments.plain or arguments.wants_help or arguments.wants_version:
        options = next((text for text in overrides if text.startswith("-")), "hydra.*")
        raise CommandError(f"{options}: is for the command line; give KEY=VALUE only")
    working_directory()  # Hydra's own error does not say what is missing
    with COMPOSING, _unchanged_hydra():
        with composing(arguments):
            config = compose_one(arguments.overrides)
        return accept(config)


@contextmanager
def _unchanged_hydra() -> Iterator[None]:
    """Restore Hydra's configuration and version base: the program may use Hydra itself."""
    hydra, version = HydraConfig.instance(), VersionBase.instance()
    before = hydra.cfg, version.version_base
    try:
        yield
    finally:
        hydra.cfg, version.version_base = before


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore settings of torch and environment variables that a run changes."""
    import torch

    with ExitStack() as stack:
        for restore in (_environment(), *_torch_settings()):
            stack.callback(restore)
        # The program may have other defaults; a run's own tensors are float32 on the CPU.
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


def _environment() -> Callable[[], None]:
    before = dict(os.environ)

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({k: v for k, v in before.items() if os.environ.get(k) != v})

    return restore


def _torch_settings() -> Iterator[Callable[[], None]]:
    """Yield functions that restore what `prepare_arithmetic` and `prepare_device` set."""
    import torch

    threads, flushes = torch.get_num_threads(), flushes_subnormals()
    yield lambda: torch.set_num_threads(threads)
    yield lambda: flush_subnormals(flushes)
    precision = torch.get_float32_matmul_precision()
    yield lambda: torch.set_float32_matmul_precision(precision)
    dtype, debug = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    yield lambda: torch.set_default_dtype(dtype)
    yield lambda: torch.set_deterministic_debug_mode(debug)
    places: tuple[tuple[Any, str], ...] = (
        (torch.utils.deterministic, "fill_uninitialized_memory"),
        (torch.backends.cuda.matmul, "allow_tf32"),
        *((torch.backends.cudnn, name) for name in ("allow_tf32", "benchmark", "deterministic")),
    )
    for place, name in places:
        yield partial(setattr, place, name, getattr(place, name))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        card = torch.cuda.current_device()
        yield lambda: torch.cuda.set_device(card)
