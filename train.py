"""Train an agent: `python train.py agent=dqn env=cartpole`; see `python train.py --help`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from steadyrl.training.cli.search_path import search_callers_directory_first
from steadyrl.training.run.signals import ended_by_signals

if TYPE_CHECKING:
    from steadyrl.agents.base import Actor, Agent
    from steadyrl.envs.vector import VectorEnv
    from steadyrl.training.config.settings import Job
    from steadyrl.training.run.run import Run


def train(job: Job) -> float | None:
    """Open the run, loop, finish; return the score a sweeper maximises."""
    # Here and not above: torch takes seconds to import, a wrong override should not.
    from steadyrl.training.setup import open_run

    with open_run(job) as (run, env, agent):
        loop(run, env, agent, agent.actor(env.spec.num_envs, explore=True))
    if run.exit_code:
        sys.exit(run.exit_code)
    return run.summary.eval_return_mean


def loop(run: Run, env: VectorEnv, agent: Agent, actor: Actor) -> None:
    """Act, step, observe, learn: a row of the timeline a turn, or, where both can, many."""
    from steadyrl.memory.profile import block

    kept = run.kept()  # a row that an earlier end of this run cut short
    while kept is not None or not run.done:
        rows = None
        if kept is not None:
            (decision, step), metrics, kept = kept, None, None
            run.agree(step)
        else:
            with block("collect"):
                decision = actor.act(env.observation, env.starts)
            if run.due:
                # Between deciding and stepping: what is learned for it here is what would be
                # learned below, so nothing changes by it but the time.
                run.report()
            with block("collect"):
                env.send(decision.action.numpy(force=True))
            metrics = None
            if agent.overlaps:
                # Learning from earlier rows goes on while the environments work on this one.
                with block("update"):
                    metrics = agent.update()
            with block("collect"):
                rows = None if run.stopped else agent.collect(decision, env.run, run.left)
                if rows is None:
                    step = env.receive()
            if rows is None:
                run.agree(step)
                if run.stopped and (run.due or agent.behind):
                    run.keep(decision, step, metrics)
                    break
        if rows is None:
            with block("collect"):
                agent.observe(decision, step)
        if not agent.overlaps:
            with block("update"):
                metrics = agent.update()
        with block("log"):
            run.record(step if rows is None else rows, metrics)


def command() -> None:
    """Train as the command line says."""
    search_callers_directory_first()
    with ended_by_signals():
        from steadyrl.training.cli.main import main  # takes a moment, in which a signal may come

        main(train)


if __name__ == "__main__":
    command()
