"""Evaluate a policy inside another program (`steadyrl.evaluate`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from steadyrl.agents.registry import Sample
from steadyrl.core.errors import validate_bool, validate_whole
from steadyrl.envs.arithmetic import flush_subnormals
from steadyrl.training.api.embedded import unchanged_process, validate_not_imported_again
from steadyrl.training.config.overrides import override_list
from steadyrl.training.config.seeds import derive_seeds
from steadyrl.training.evaluation.evaluator import Evaluation, Evaluator
from steadyrl.training.evaluation.fresh_episodes import scoring_seed
from steadyrl.training.policies.loaded import LoadedPolicy
from steadyrl.training.run.hardware import prepare_arithmetic, thread_count


def evaluate_policy(
    policy: LoadedPolicy,
    *,
    env: Sequence[str],
    episodes: int | None,
    seed: int | None,
    deterministic: bool,
) -> Evaluation:
    """Play episodes with the policy's weights, as the command `evaluate` does, on the CPU."""
    validate_not_imported_again()
    validate_bool("deterministic", deterministic)
    for name, value, least in (("episodes", episodes, 1), ("seed", seed, 0)):
        if value is not None:
            validate_whole(name, value, least)
    training = policy.settings(override_list("env", env, "kwargs.g=5")).run
    run = replace(
        training, eval=replace(training.eval, episodes=episodes or training.eval.episodes)
    )
    own = scoring_seed(training, run, best=policy.best)
    run = replace(run, seed=own if seed is None else seed)
    seeds = derive_seeds(run.seed)
    with unchanged_process():
        flush_subnormals(True)  # as in training; processes started from here inherit it
        with closing(Evaluator(run, seed=seeds.evaluation)) as evaluator:
            spec = evaluator.env.spec
            prepare_arithmetic(thread_count(run.threads, spec))
            sample = None if deterministic else Sample(spec.num_envs, seeds.agent)
            result = evaluator.play(policy.actor_for(spec, sample), lambda: False)
    assert result is not None  # nothing stops it
    return result
