"""Collect experience: one timestep of N environments per call, or blocks of them in compiled code.

The order within a timestep is fixed: act, evaluate and log, send the actions, update (DQN), receive
the step, observe it, update (PPO). So a run learns the same bits with every backend, however often
it evaluates, and after any interruption.
"""

from __future__ import annotations

from time import perf_counter

from typing_extensions import override

from steadyrl.agents.base import Actor, Agent, Decision
from steadyrl.core.metrics import Metrics
from steadyrl.envs.types import BlockResult, Episode, Step
from steadyrl.envs.vector import VectorEnv
from steadyrl.training.run.hardware import Arithmetic, validate_torch_defaults
from steadyrl.training.run.run import Run
from steadyrl.training.run.services import Collected


class Decider:
    """Return the decision that a resumed run was saved with, once; otherwise act."""

    def __init__(self, env: VectorEnv, actor: Actor) -> None:
        self._env, self._actor = env, actor
        self.pending: Decision | None = None

    def __call__(self) -> Decision:
        """Return the next decision."""
        pending, self.pending = self.pending, None
        return pending or self._actor.act(self._env.observation, self._env.episode_starts)


class StepCollector:
    """Collects one timestep of N environments per call."""

    def __init__(self, run: Run, env: VectorEnv, agent: Agent, actor: Actor) -> None:
        self.run, self.env, self.agent = run, env, agent
        self._times, self._since = run.part_times, 0.0  # when waiting for the environments began
        self.decide = Decider(env, actor)
        self._arithmetic = Arithmetic.read()  # which environments may change

    def finish_pending_step(self) -> None:
        """Observe and count the step that an interruption left pending, if there is one."""
        decision, step = self.run.pop_pending_step() or (None, None)
        if decision is None or step is None:
            self.decide.pending = decision  # `collect` begins with it
            return
        steps = self.run.sync_ranks(step)
        self.run.on_steps(self._finish_step(decision, step, steps, None))

    def collect(self) -> Collected | None:
        """Collect one timestep and do the updates that are due.

        None: the run is to stop, and the step is pending because earlier work is not done.
        """
        decision, metrics = self._begin_step()
        return self._end_step(decision, metrics)

    def _begin_step(self) -> tuple[Decision, Metrics | None]:
        """Act, evaluate and log, send the actions; update during the step if the agent can."""
        times, begin = self._times, perf_counter()
        decision = self.decide()
        acted = perf_counter()
        times.act += acted - begin
        if self.run.event_due:
            # Due updates are done before an evaluation, but after acting, as without one: it
            # changes no action.
            self.run.evaluate_and_log()
            self._arithmetic.restore()
            acted = perf_counter()
        self.env.send(decision.env_action.numpy(force=True))
        self._since, metrics = acted, None
        if self.agent.can_update_during_step:
            # DQN learns from earlier steps while the environments work on this one.
            times.environment += perf_counter() - acted
            metrics = times.timed_update(self.agent)
            self._since = perf_counter()
        return decision, metrics

    def _end_step(self, decision: Decision, metrics: Metrics | None) -> Collected | None:
        """Receive the step and finish it, unless the run is to stop with earlier work not done."""
        run, step = self.run, self.env.receive()
        validate_torch_defaults(self.env.spec.id)
        self._arithmetic.restore()
        self._times.environment += perf_counter() - self._since
        steps = run.sync_ranks(step)
        if run.cut_short and (run.event_due or self.agent.has_pending_updates):
            run.stash_pending_step(decision, step, metrics)  # resumed after that work
            return None
        return self._finish_step(decision, step, steps, metrics)

    def _finish_step(
        self, decision: Decision, step: Step, steps: int, metrics: Metrics | None
    ) -> Collected:
        """Observe the step, and update if the agent could not do so during it."""
        self.agent.observe(decision, step)
        return self._collected(steps, tuple((steps, each) for each in step.episodes), metrics)

    def _collected(
        self, steps: int, episodes: tuple[tuple[int, Episode], ...], metrics: Metrics | None
    ) -> Collected:
        """Do the updates that had to wait for these steps; return what was collected.

        After the best evaluation the run does them, once its checkpoint is saved.
        """
        if not self.agent.can_update_during_step and not self.run.best_unsaved:
            metrics = self._times.timed_update(self.agent)  # PPO, once its rollout is full
        return Collected(steps, episodes, metrics)


class BlockCollector(StepCollector):
    """Collects a block of timesteps per call, in compiled code, whenever the agent can.

    The compiled code acts, steps and stores until an update, a report or a checkpoint is due.
    """

    @override
    def collect(self) -> Collected | None:
        """Collect a block of timesteps; a single one if there can be none."""
        decision, metrics = self._begin_step()
        block = self._collect_block(decision)
        if block is None:
            return self._end_step(decision, metrics)
        return self._collected(*block, metrics)

    def _collect_block(self, decision: Decision) -> BlockResult | None:
        """Finish the step that was begun, and take more; None if the agent cannot at the moment."""
        if self.run.cut_short:
            return None
        steps = self.run.steps_until_next_event
        block = self.agent.collect_block(decision, self.env.step_many, steps)
        if block is not None:  # one call acts, steps and stores
            self._times.environment += perf_counter() - self._since
        return block


def build_collector(run: Run, env: VectorEnv, agent: Agent) -> StepCollector:
    """Return the collector for these environments; with `memory.profile` on, measure its calls."""
    validate_torch_defaults(env.spec.id)  # which a reset may have changed
    actor = agent.actor(env.spec.num_envs, explore=True)
    collecting = (
        *((env, "send"), (env, "receive"), (actor, "act")),
        *((agent, "observe"), (agent, "collect_block")),
    )
    run.profile({"collect": collecting, "update": ((agent, "update"),)})
    kind = BlockCollector if env.runs_blocks else StepCollector
    collector = kind(run, env, agent, actor)
    run.attach(env, collector.decide)
    return collector
