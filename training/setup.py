"""Build the parts of a run, and close them however the run ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from steadyrl.agents.base import Agent, LatestLearningStart
from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.registry import build_agent, of_rank
from steadyrl.core.clock import doing
from steadyrl.core.command.streams import open_standard_streams
from steadyrl.core.files import unchanged_directory
from steadyrl.core.jit import compilation_as_phase
from steadyrl.core.safe_parsing import read_yaml
from steadyrl.envs.factory import build_env, choose_backend
from steadyrl.envs.vector import VectorEnv
from steadyrl.memory.budget import memory_plan
from steadyrl.memory.cache_cleaner import reclaim, unmap_clean_pages
from steadyrl.memory.gpu.cards import runs_at_once, taken_card
from steadyrl.memory.gpu.limit import limited
from steadyrl.memory.watch import MemoryWatch
from steadyrl.training.checkpoints.manifest import saved_below
from steadyrl.training.checkpoints.run_directory import (
    CHECKPOINTS,
    CONFIG,
    RunDirectory,
    UnlockedDirectory,
)
from steadyrl.training.checkpoints.saver import Saver
from steadyrl.training.checkpoints.summary import Summary
from steadyrl.training.config.overrides import preset_options
from steadyrl.training.config.remarks import remarks
from steadyrl.training.config.seeds import derive_seeds, evaluation_seed
from steadyrl.training.config.settings import Job, LogSettings, RunSettings
from steadyrl.training.config.urls import is_url
from steadyrl.training.continued import continue_run
from steadyrl.training.distributed.init import init_comm
from steadyrl.training.evaluation.evaluator import Evaluator
from steadyrl.training.evaluation.video import VideoRecorder
from steadyrl.training.logging.display import Display, Filling
from steadyrl.training.logging.logger import (
    Logger,
    NoLogger,
    crash_stack_to,
    log_name,
    to_file,
)
from steadyrl.training.logging.screen import displayed, find_screen
from steadyrl.training.logging.sinks import RunInfo, Sink
from steadyrl.training.logging.trackio import Trackio
from steadyrl.training.logging.wandb import WandB
from steadyrl.training.mirror.fetch import fetch
from steadyrl.training.mirror.mirror import FIELD, NO_MIRROR, Mirror, NoMirror
from steadyrl.training.mirror.remote import RemoteFolder, mirror_url
from steadyrl.training.policies.policy import run_metadata, starting_policy, trained
from steadyrl.training.policies.teacher import find_teacher
from steadyrl.training.profiler.trace import traced_updates
from steadyrl.training.report.writer import ReportWriter
from steadyrl.training.run.finalize import finalize_run
from steadyrl.training.run.hardware import (
    Arithmetic,
    choose_device,
    device_name,
    prepare_arithmetic,
    prepare_device,
    thread_count,
    validate_torch_defaults,
)
from steadyrl.training.run.job import display_name
from steadyrl.training.run.rank_info import rank_info
from steadyrl.training.run.run import Run
from steadyrl.training.run.services import RunServices
from steadyrl.training.run.signals import Patience, StopSignals
from steadyrl.training.run.watcher import Watcher

log = logging.getLogger("steadyrl")


@contextmanager
def build(job: Job, comm: Comm = SINGLE_PROCESS) -> Iterator[tuple[VectorEnv, Agent]]:
    """Yield a job's environments and agent, without logging; free them on exit."""
    settings = job.settings.run
    seeds = derive_seeds(settings.seed, comm.rank)
    device = torch.device(device_name(settings.device))
    if job.own_process:
        unmap_clean_pages()  # frees most of the memory that imports mapped
    threads = thread_count(settings.threads, job.spec, rank_info().local_size)
    prepare_arithmetic(threads)
    prepare_device(settings, device)
    arithmetic = Arithmetic.read()
    with doing("building the environments"):
        built = build_env(settings.env, seed=seeds.env)
    with built as env, limited(device, settings.memory.cuda_limit_mb):
        prepare_arithmetic(threads)  # an environment may have changed the settings
        arithmetic.restore()
        validate_torch_defaults(settings.env.id)
        job.spec.validate_same("training", env.spec)
        with doing("building the agent"):
            agent = build_agent(
                of_rank(job.settings.agent, comm.rank, comm.size),
                env.spec,
                device=device,
                seed=seeds.agent,
                total_steps=settings.total_steps,
                teacher=find_teacher(job.settings.agent, env.spec, device),
            )
        agent.set_precision(settings.precision)
        if not comm.is_single:
            agent.attach_comm(comm)
        try:
            yield env, agent
        finally:
            agent.release()
            # A learner is part of a reference cycle, which only the garbage collector frees.
            reclaim(device, own_process=job.own_process)


@contextmanager
def open_run(job: Job) -> Iterator[tuple[Run, VectorEnv, Agent]]:
    """Yield the run, its environments and its agent.

    Writes the summary and closes everything on exit.
    """
    with unchanged_directory(), ExitStack() as stack:
        signals, watcher, progress = _open_signals_and_display(stack, job)
        job = stack.enter_context(on_device(job))
        comm = stack.enter_context(init_comm(job, signals.stop))
        job = job._replace(directory=Path(comm.all_gather(str(job.directory))[0]))
        settings, is_new = job.settings.run, job.continues is None

        # The agent and its environments.
        env, agent = stack.enter_context(build(job, comm))
        arithmetic = Arithmetic.read()
        agent.set_stop_flag(signals.stop)
        metadata = run_metadata(job.config, replace(env.spec, spaces=job.spec.spaces), agent)
        initial = _load_initial_weights(settings.init_from, agent, metadata) if is_new else ""
        evaluator = _evaluator(stack, settings, env) if comm.rank == 0 else None
        envs = [env] if evaluator is None else [env, evaluator.env]
        patience = Patience(settings, envs)
        signals.patience = patience.seconds
        watcher.watch(envs, signals.step_limit)
        watch = _open_watch(stack, job, agent, envs)
        mirror = _open_mirror(stack, job, comm)

        # The directory: after all that may fail, so that an error leaves none behind.
        if is_new:
            signals.begin()
        directory, begin_log = _open_directory_and_log(stack, job, comm, watcher)
        _announce(job, env, agent, watch, initial)

        # The run, and what it works with.
        services = RunServices(
            directory=directory,
            logger=stack.enter_context(closing(_logger(job, directory.path, comm))),
            progress=progress,
            evaluator=evaluator,
            signals=signals,
            watch=watch,
            saver=Saver(settings.checkpoint, directory.path, metadata),
            video_recorder=VideoRecorder(settings, directory.path, seed=evaluation_seed(settings)),
            report_writer=ReportWriter(settings.report, directory.path, writes=comm.rank == 0),
            comm=comm,
            callbacks=job.callbacks,
            mirror=mirror,
        )
        run, services = _build_run(stack, job, env, agent, services, metadata)
        _follow_steps(run, services, envs, patience)
        rank = None if comm.is_single else comm.rank
        stack.enter_context(traced_updates(settings.profiler, agent, directory.path, rank))
        if settings.resume is not None:
            continue_run(job, run, services, _initial_files(job))
            begin_log()
            signals.begin()
        if job.own_process:
            stack.enter_context(crash_stack_to(services.log_file))
        with finalize_run(run, services):
            _start_run(job, run, env, agent, services, arithmetic)
            yield run, env, agent


def _load_initial_weights(name: str | None, agent: Agent, metadata: Mapping[str, Any]) -> str:
    """Load the weights of the policy `init_from`; return a line about it for the log."""
    if name is None:
        return ""
    policy = starting_policy(Path(name), metadata)
    agent.load_weights(policy.weights)
    return f"initial weights: {policy.path}{trained(policy)}; all else begins anew, at step 0"


def _open_signals_and_display(stack: ExitStack, job: Job) -> tuple[StopSignals, Watcher, Display]:
    """Handle signals and show what happens; in another program's process, leave its signals."""
    screen, own, together = find_screen(), job.own_process, rank_info().size > 1
    if own:
        open_standard_streams()  # building the environment to look at it may have closed one
    signals = stack.enter_context(StopSignals(handle=own))
    limit = signals.step_limit()
    watcher = stack.enter_context(Watcher(limit, together=together, enabled=own))
    signals.on_begin, signals.on_limit = watcher.begun, watcher.allow
    total, silent = job.settings.run.total_steps, job.quiet or rank_info().rank > 0
    display = displayed(screen, total, job.label, silent=silent, own_process=own)
    progress = stack.enter_context(display)
    stack.enter_context(compilation_as_phase())
    return signals, watcher, progress


def _start_run(
    job: Job,
    run: Run,
    env: VectorEnv,
    agent: Agent,
    services: RunServices,
    arithmetic: Arithmetic,
) -> None:
    """Reset the environments of a new run and save it, or save what a resumed run changed."""
    services.mirror.attach(services.saver.checkpoints)
    if job.continues is None:
        with doing("resetting the environments"):
            env.reset()
    services.signals.reinstall()
    arithmetic.restore()  # environments were reset, or have replayed their episodes
    run.callbacks.notify("on_start", run.steps)
    arithmetic.restore()  # a callback may have changed it too
    if job.continues is None:
        services.saver.start()
    else:
        services.saver.save_changes(job.continues, run.steps)
    filling = _filling_until_updates(run, agent, job.settings.run.total_steps)
    services.progress.begin(run.steps, env.clock, agent.updates, filling)


def _filling_until_updates(run: Run, agent: Agent, total_steps: int) -> Filling | None:
    """Log when learning begins, or that it never does; return what is filled until then."""
    start = agent.learning_start
    if start is None or run.steps >= min(start.step, total_steps):
        return None
    bound = isinstance(start, LatestLearningStart)
    latest = " at the latest" if bound else ""
    begins = f"learning begins at step {start.step:,}{latest} ({start.reason})"
    if start.step > total_steps:
        nothing = "nothing more" if agent.updates else "nothing"
        nothing = f"perhaps {nothing}" if bound else nothing
        log.warning(f"{nothing} will be learned: the run ends at step {total_steps:,}, {begins}")
        return None
    log.info(begins)
    return Filling(start.fills, start.step)


@contextmanager
def on_device(job: Job) -> Iterator[Job]:
    """Yield the job with `device` resolved; runs started at once take a GPU each."""
    device = choose_device(job.settings.run, job.settings.agent, job.spec)
    with ExitStack() as stack:
        if device == "cuda" and runs_at_once() > 1 and rank_info().size == 1:
            device = f"cuda:{stack.enter_context(taken_card(torch.cuda.device_count()))}"
        run = replace(job.settings.run, device=device)
        yield job._replace(settings=replace(job.settings, run=run))


def _open_watch(stack: ExitStack, job: Job, agent: Agent, envs: Sequence[VectorEnv]) -> MemoryWatch:
    """Start watching memory; raise MemoryBudgetError if the run does not fit."""
    run, rank = job.settings.run, rank_info().rank
    watch = MemoryWatch(
        run.memory,
        torch.device(device_name(run.device)),
        buffers=agent.nbytes(),
        host_buffers=agent.host_nbytes(),
        holders={"agent": agent, "env": envs[0], "callbacks": job.callbacks},
        own_process=job.own_process,
        find_error=lambda: next((env.memory_error for env in envs if env.memory_error), None),
        snapshot=job.directory / f"cuda-memory{f'-rank{rank}' if rank else ''}.pickle",
    )
    stack.callback(watch.close)
    watch.validate_room()
    return watch


def _evaluator(stack: ExitStack, settings: RunSettings, env: VectorEnv) -> Evaluator | None:
    """Return the evaluator, with environments of its own; None if `eval.every` is 0."""
    if not settings.eval.every:
        return None
    seed = evaluation_seed(settings)
    with doing("building the evaluation environments"):
        evaluator = stack.enter_context(closing(Evaluator(settings, seed=seed)))
    env.spec.validate_same("evaluation", evaluator.env.spec)
    return evaluator


def _open_mirror(stack: ExitStack, job: Job, comm: Comm) -> NoMirror:
    """Begin to copy the run to object storage: rank 0, if `checkpoint.mirror` is set."""
    saving = job.settings.run.checkpoint
    if saving.mirror is None or comm.rank:
        return NO_MIRROR
    folder = RemoteFolder(mirror_url(saving.mirror, job.directory), FIELD)
    mirror = Mirror(
        folder,
        job.directory,
        job.config,
        keep=saving.most,
        new=job.continues is None,
        goes_back=is_url(job.settings.run.resume) or _goes_back(job),
    )
    stack.callback(mirror.close)
    mirror.begin()
    return mirror


def _build_run(
    stack: ExitStack,
    job: Job,
    env: VectorEnv,
    agent: Agent,
    services: RunServices,
    metadata: dict[str, Any],
) -> tuple[Run, RunServices]:
    """Return the run and its services, coordinated over ranks if there are several."""
    s, path = job.settings, str(services.directory.path)
    summary = Summary("failed", path, s.agent.name, s.run.env.id, s.run.seed)
    if services.comm.is_single:
        run = Run(s, agent, services, summary)
    else:
        from steadyrl.training.distributed.run import (  # not needed by a single process
            RankRun,
            shared,
        )

        services = shared(services, s.run, metadata, env)
        run = RankRun(s, agent, services, summary)
    services.saver.attach(run, env, agent)
    stack.callback(services.saver.checkpoints.abandon)
    return run, services


def _follow_steps(
    run: Run, services: RunServices, envs: Sequence[VectorEnv], patience: Patience
) -> None:
    """Name steps by the run's count in errors, and time all parts of a step for signals."""
    for each in envs:
        each.name_steps_by(lambda: run.steps)
    patience.parts = run.callbacks.clock, run.part_times, services.video_recorder.clock


def _open_directory_and_log(
    stack: ExitStack, job: Job, comm: Comm, watcher: Watcher
) -> tuple[RunDirectory, Callable[[], None]]:
    """Return the run directory, and a function that starts writing a resumed run's log there."""
    directory = stack.enter_context(_open_directory(job, comm))
    log_file = directory.path / log_name(comm.rank)
    buffered = job.settings.run.resume is not None
    begin_log = stack.enter_context(to_file(log_file, buffered=buffered))
    watcher.log_to(log_file)
    return directory, begin_log


def _open_directory(job: Job, comm: Comm) -> RunDirectory:
    if comm.rank:
        return UnlockedDirectory(job.directory)
    if is_url(job.settings.run.resume):
        directory = RunDirectory(job.directory)
        try:
            fetch(str(job.settings.run.resume), job.directory)
        except BaseException:
            directory.discard()
            raise
        return directory
    if job.settings.run.resume is not None:
        elsewhere = job.checkpoint and not _goes_back(job)
        continued = not elsewhere or _was_killed_at_once(job)
        return RunDirectory(job.directory, continued=continued)
    return RunDirectory(job.directory, _initial_files(job))


def _goes_back(job: Job) -> bool:
    """Return whether the user has named one of the run's own checkpoints to go on from."""
    return job.checkpoint is not None and job.checkpoint.parents[1] == job.directory


def _was_killed_at_once(job: Job) -> bool:
    """Return whether the same start was killed before it had saved anything."""
    with suppress(OSError, ValueError):
        before = read_yaml(job.directory / CONFIG)
        same = isinstance(before, dict) and before.get("resume") == job.settings.run.resume
        return same and not saved_below(job.directory / CHECKPOINTS)
    return False


def _initial_files(job: Job) -> dict[str, str]:
    """Return the files written into a new run directory."""
    files = {f".hydra/{name}.yaml": content for name, content in job.hydra.items()}
    # Last, because config.yaml marks the directory as a run.
    files[CONFIG] = job.config
    return {name: OmegaConf.to_yaml(OmegaConf.create(each)) for name, each in files.items()}


def _logger(job: Job, path: Path, comm: Comm) -> Logger:
    if comm.rank:
        return NoLogger()
    info = RunInfo(path.name, job.config, job.hydra.get("overrides", ()))
    if "hydra" in job.hydra:
        sources = job.hydra["hydra"]["hydra"]["runtime"]["config_sources"]
        info = info._replace(options=preset_options(sources))
    settings = job.settings.run.log
    shown = info._replace(name=display_name(job.settings.run.run_name, path))
    return Logger(path, info, _trackers(settings, path, shown), tensorboard=settings.tensorboard)


def _trackers(settings: LogSettings, path: Path, info: RunInfo) -> list[Sink]:
    """Return the sinks beside the run directory's files."""
    found: list[Sink] = []
    if settings.wandb.enabled:
        found.append(WandB(path, info, settings.wandb))
    if settings.trackio.enabled:
        found.append(Trackio(path, info, settings.trackio))
    return found


def _announce(job: Job, env: VectorEnv, agent: Agent, watch: MemoryWatch, initial: str) -> None:
    s, nearest = job.settings, watch.nearest_limit()
    device = torch.device(device_name(s.run.device))
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
    held = watch.held
    parts = agent.nbytes() | ({"all processes": held} if held else {})
    log.info(memory_plan(parts, device, nearest and nearest.bound))
    if initial:
        log.info(initial)
    typed = job.hydra.get("overrides", ())
    spec = replace(env.spec, num_envs=env.spec.num_envs * rank_info().size)
    for line in remarks(typed, s, spec, lambda: choose_backend(s.run.env)[0]):
        log.warning(line)
