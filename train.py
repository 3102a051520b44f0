"""Train an agent: `python train.py agent=dqn env=cartpole`; see `python train.py --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steadyrl.training.cli.start import started

if TYPE_CHECKING:
    from steadyrl.training.config.settings import Job
    from steadyrl.training.run.collector import StepCollector
    from steadyrl.training.run.run import Run
    from steadyrl.training.run.services import RunResult


def train(job: Job) -> RunResult:
    """Train one agent; return the run's summary, score and exit code."""
    from steadyrl.training.logging.screen import loading
    from steadyrl.training.run.rank_info import rank_info

    # Imported here: torch takes seconds, and a wrong override should be refused before.
    silent = job.quiet or rank_info().rank > 0
    with loading(silent=silent, own_process=job.own_process):
        from steadyrl.training.run.collector import build_collector
        from steadyrl.training.setup import open_run

    with open_run(job) as (run, env, agent):
        loop(run, build_collector(run, env, agent))
    return run.result


def loop(run: Run, collector: StepCollector) -> None:
    """Collect steps and learn from them until the run is done."""
    collector.finish_pending_step()  # one that an interruption left half done
    while not run.done:
        collected = collector.collect()
        if collected is not None:  # None: a signal came, and the step is saved as pending
            run.on_steps(collected)


def command() -> None:
    """Train as the command line says."""
    with started():
        from steadyrl.training.cli.main import main  # takes a moment: a signal may come

        main(train)


if __name__ == "__main__":
    command()
