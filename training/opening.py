"""Build the parts of a run, hold them while it lasts, and close them however it ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
from omegaconf import OmegaConf
from rich.console import Console

from agents.base import Agent
from agents.registry import build_agent
from envs.factory import build_env
from envs.vector import VectorEnv
from memory.budget import plan_line
from memory.errors import MemoryBudgetError, NonFiniteError
from memory.watch import MemoryWatch
from training import messages
from training.evaluation import Evaluator
from training.hardware import device_name, prepare_arithmetic, thread_count
from training.job import Job
from training.logger import Logger
from training.progress import open_progress
from training.run import Parts, Run
from training.run_directory import RunDirectory, RunDirectoryLostError
from training.seeding import spawn
from training.signals import StopSignals
from training.summary import Summary

log = logging.getLogger("steadyrl")

# Ways to end that a signal does not excuse.
OWN_ENDS = (NonFiniteError, MemoryBudgetError, RunDirectoryLostError, GeneratorExit, SystemExit)


@contextmanager
def open_run(job: Job) -> Iterator[tuple[Run, VectorEnv, Agent]]:
    """Yield the run, its environments and its agent; write the summary and close on leaving."""
    settings = job.settings.run
    console = Console(highlight=False)
    seeds = spawn(settings.seed)
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        stack.enter_context(messages.to_terminal(console))
        device = torch.device(device_name(settings.device))
        prepare_arithmetic(thread_count(settings.threads, job.spec))
        env = stack.enter_context(build_env(settings.env, seed=seeds.env))
        agent = build_agent(
            job.settings.agent,
            env.spec,
            device=device,
            seed=seeds.agent,
            total_steps=settings.total_steps,
        )
        stack.callback(agent.release)
        evaluator = None
        if settings.eval.every:
            evaluator = stack.enter_context(closing(Evaluator(settings, seed=seeds.evaluation)))
        # Last, so that what cannot be built leaves no directory behind.
        signals.begin()
        directory = stack.enter_context(_open_directory(job))
        stack.enter_context(messages.to_file(directory.path / "train.log"))
        _announce(job, env, device)
        log.info(plan_line(agent.nbytes(), built=True))
        watch = MemoryWatch(
            settings.memory, device, buffers=agent.nbytes(), holders={"agent": agent}
        )
        stack.callback(watch.close)
        logger = stack.enter_context(closing(Logger(directory.path)))
        progress = stack.enter_context(closing(open_progress(console, settings.total_steps)))
        parts = Parts(directory, logger, progress, evaluator, signals, watch)
        run = Run(job.settings, agent, parts, _summary(job, directory.path))
        with _ending(run, directory.path, progress, signals):
            yield run, env, agent


def _open_directory(job: Job) -> RunDirectory:
    kept = {f".hydra/{name}.yaml": content for name, content in job.hydra.items()}
    # Last, because it says that the directory holds a run.
    kept["config.yaml"] = job.config
    texts = {name: OmegaConf.to_yaml(OmegaConf.create(each)) for name, each in kept.items()}
    return RunDirectory(job.directory, texts)


def _summary(job: Job, path: Path) -> Summary:
    s = job.settings
    return Summary("failed", str(path), s.agent.name, s.run.env.id, s.run.seed)


def _announce(job: Job, env: VectorEnv, device: torch.device) -> None:
    s = job.settings
    log.info(
        "%s on %s: %s steps, %d environment%s, seed %d, %s, %d thread%s",
        s.agent.name.upper(),
        s.run.env.id,
        f"{s.run.total_steps:,}",
        env.spec.num_envs,
        "" if env.spec.num_envs == 1 else "s",
        s.run.seed,
        device,
        torch.get_num_threads(),
        "" if torch.get_num_threads() == 1 else "s",
    )


@contextmanager
def _ending(
    run: Run, path: Path, progress: messages.Closable, signals: StopSignals
) -> Iterator[None]:
    """Give every way out its status, and write the summary on all of them."""
    try:
        yield
        run.finish()
    except KeyboardInterrupt:
        run.fail("interrupted")
        raise
    except BaseException as error:
        log.debug("the run failed", exc_info=True)
        if signals.received is not None and not isinstance(error, OWN_ENDS):
            # Ctrl-C reaches compilers and simulators too: what broke then was asked to.
            run.fail("interrupted")
        else:
            run.fail("diverged" if isinstance(error, NonFiniteError) else "failed")
            raise
    finally:
        progress.close()
        with signals.shielded():
            run.summary.save(path)
    _report(run, path)


def _report(run: Run, path: Path) -> None:
    s = run.summary
    score = "" if s.eval_return_mean is None else f", evaluated return {s.eval_return_mean:.1f}"
    mean = "" if s.return_mean is None else f", return {s.return_mean:.1f}"
    log.info(
        "%s after %s steps in %.0f s (%s steps/s)%s%s",
        s.status,
        f"{s.steps:,}",
        s.wall_seconds,
        f"{s.steps_per_second:,.0f}",
        mean,
        score,
    )
    log.info("run:    %s", path)
    log.info("curves: tensorboard --logdir %s", path)
