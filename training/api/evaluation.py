"""Evaluate a policy inside another program (`steadyrl.evaluate`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from steadyrl.agents.registry import Sample
from steadyrl.core.errors import SettingError
from steadyrl.envs.arithmetic import flush_subnormals
from steadyrl.training.api.embedded import unchanged_process
from steadyrl.training.evaluation.evaluator import Evaluation, Evaluator
from steadyrl.training.policies.loaded import LoadedPolicy
from steadyrl.training.run.hardware import prepare_arithmetic, thread_count
from steadyrl.training.setup import derive_seeds


def evaluate_policy(
    policy: LoadedPolicy,
    *,
    env: Sequence[str],
    episodes: int | None,
    seed: int | None,
    deterministic: bool,
) -> Evaluation:
    """Play episodes with the policy's weights, as the command `evaluate` does, on the CPU."""
    for name, value, least in (("episodes", episodes, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise SettingError(name, value, f"must be {least} or more")
    run = policy.settings(env).run
    run = replace(run, seed=run.seed if seed is None else seed)
    run = replace(run, eval=replace(run.eval, episodes=episodes or run.eval.episodes))
    seeds = derive_seeds(run.seed)
    with unchanged_process():
        flush_subnormals(True)  # as in training; processes started from here inherit it
        with closing(Evaluator(run, seed=seeds.evaluation)) as evaluator:
            spec = evaluator.spec
            prepare_arithmetic(thread_count(run.threads, spec))
            sample = None if deterministic else Sample(spec.num_envs, seeds.agent)
            result = evaluator.play(policy.actor_for(spec, sample), lambda: False)
    assert result is not None  # nothing stops it
    return result
