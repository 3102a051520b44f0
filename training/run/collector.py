"""Collect experience: one timestep of N environments per call, or a block of them in compiled code.

A timestep always goes: act, evaluate and log, send the actions, update (DQN), receive the step,
observe it, update (PPO). So a run learns the same bits with every backend, whether it evaluates or
not, and after an interruption.
"""

from __future__ import annotations

import sys

from typing_extensions import override

from steadyrl.agents.base import Actor, Agent, Decision
from steadyrl.core.metrics import Metrics
from steadyrl.envs.types import Episode, Rows, Step
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.run.run import Collected, Run


class StepCollector:
    """Collect one timestep of N environments per call."""

    def __init__(self, run: Run, env: VectorEnv, agent: Agent, actor: Actor) -> None:
        self.run, self.env, self.agent, self.actor = run, env, agent, actor

    def finish_pending_step(self) -> None:
        """Observe and count the step that an interruption left pending, if there is one."""
        pending = self.run.pop_pending_step()
        if pending is not None:
            decision, step = pending
            steps = self.run.sync_ranks(step)
            self.run.on_steps(self._observe(decision, step, steps, None))

    def collect(self, max_steps: int = sys.maxsize) -> Collected | None:
        """Collect one timestep, however few steps are asked for; update where that is due.

        None where the run is to stop before all that is due is done: the step is pending then.
        """
        decision, metrics = self._begin_step()
        return self._end_step(decision, metrics)

    def _begin_step(self) -> tuple[Decision, Metrics | None]:
        """Act, evaluate and log what is due, send the actions; return what updates came to."""
        decision = self.actor.act(self.env.observation, self.env.starts)
        if self.run.report_due:
            # Once the actions are decided on: evaluating more or less often changes none of them.
            self.run.evaluate_and_log()
        self.env.send(decision.action.numpy(force=True))
        # DQN needs earlier steps only, and learns from them while the environments work on this.
        metrics = self.agent.update() if self.agent.can_update_during_step else None
        return decision, metrics

    def _end_step(self, decision: Decision, metrics: Metrics | None) -> Collected | None:
        """Receive the step and observe it, unless something that comes first was cut short."""
        run, step = self.run, self.env.receive()
        steps = run.sync_ranks(step)
        if run.stopped and (run.report_due or self.agent.has_pending_updates):
            run.stash_pending_step(decision, step, metrics)
            return None
        return self._observe(decision, step, steps, metrics)

    def _observe(
        self, decision: Decision, step: Step, steps: int, metrics: Metrics | None
    ) -> Collected:
        """Let the agent store the step; update, if it could not before."""
        self.agent.observe(decision, step)
        return self._updated(steps, tuple((steps, each) for each in step.episodes), metrics)

    def _updated(
        self, steps: int, episodes: tuple[tuple[int, Episode], ...], metrics: Metrics | None
    ) -> Collected:
        if not self.agent.can_update_during_step:
            metrics = self.agent.update()  # PPO, once its rollout is full
        return Collected(steps, episodes, metrics)


class BlockCollector(StepCollector):
    """Collect many timesteps per call, in compiled code, wherever the agent can.

    Each is stored as it is made. A block ends where learning, a report or a checkpoint is due.
    """

    @override
    def collect(self, max_steps: int = sys.maxsize) -> Collected | None:
        """Collect up to `max_steps` steps, or one timestep where there can be no block."""
        decision, metrics = self._begin_step()
        block = self._collect_block(decision, max_steps)
        if block is None:
            return self._end_step(decision, metrics)
        return self._updated(*block, metrics)

    def _collect_block(self, decision: Decision, max_steps: int) -> Rows | None:
        """Take the step that was begun, and many more; None if the agent cannot, for now."""
        if self.run.stopped:
            return None
        steps = min(max_steps, self.run.steps_until_next_event)
        return self.agent.collect_block(decision, self.env.run, steps)


def build_collector(run: Run, env: VectorEnv, agent: Agent) -> StepCollector:
    """Return what collects for a run; where it profiles, calls of its parts are measured."""
    actor = agent.actor(env.spec.num_envs, explore=True)
    collecting = (
        *((env, "send"), (env, "receive"), (actor, "act")),
        *((agent, "observe"), (agent, "collect_block")),
    )
    run.profile({"collect": collecting, "update": ((agent, "update"),)})
    kind = BlockCollector if env.runs_blocks else StepCollector
    return kind(run, env, agent, actor)
