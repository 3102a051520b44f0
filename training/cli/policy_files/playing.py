"""A policy of the command line, and its actor in environments: for `evaluate` and `record`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from steadyrl.core.clock import doing
from steadyrl.core.errors import ExpectedError, SettingError, exit_with, one_line
from steadyrl.envs.settings import EnvSettings
from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.policies.find import find_policy, settings_for, validate_same_spaces

if TYPE_CHECKING:
    from steadyrl.agents.base import Actor
    from steadyrl.envs.types import EnvSpec
    from steadyrl.training.config.settings import RunSettings, Settings
    from steadyrl.training.policies.policy import CheckedPolicy

# Options of other trainers' programs, and what is written here.
HABITS = {
    "-n": "write --episodes N",
    "--n-eval-episodes": "write --episodes N",
    "--n-timesteps": "write --episodes N",
    "--deterministic": "actions are greedy unless --sample is given",
    "--stochastic": "write --sample",
}

ATTEMPTS = 3  # to read a policy that a running run may be replacing
# Environment errors name keys without the prefix env.; these are recognised and prefixed.
OF_ENVIRONMENTS = tuple(field.name for field in fields(EnvSettings))


@contextmanager
def exit_on_any_error() -> Iterator[None]:
    """End the process with one line for every error: environments are users' code."""
    try:
        yield
    except Exception as error:
        from steadyrl.training.cli.failures import as_expected_error

        if isinstance(error, SettingError) and error.field.startswith(OF_ENVIRONMENTS):
            error = error.below("env")
        exit_with(error if isinstance(error, ExpectedError) else as_expected_error(error, None))


def settings_of_policy(
    program: str, typed: Sequence[str] | None, args: argparse.Namespace
) -> Settings:
    """Return the settings of the policy that was named, and print remarks about it.

    `typed`: the arguments of the program, for the command that a refusal ends with.
    """
    policy = find_policy(args.policy, best=args.best)
    for remark in policy.remarks:
        print(f"note: {one_line(remark)}", file=sys.stderr)
    return settings_for(program, sys.argv[1:] if typed is None else typed, policy, args.env)


def load(args: argparse.Namespace) -> CheckedPolicy:
    """Return the policy with its weights; retry, because a running run may be replacing them."""
    with doing("loading torch"):
        from steadyrl.training.policies.policy import CheckedPolicy, read_weights

    for _ in range(ATTEMPTS):
        policy = find_policy(args.policy, best=args.best)
        try:
            with doing("loading the policy"):
                weights = read_weights(policy)
                return CheckedPolicy(policy.path, policy.metadata, weights=weights)
        except CheckpointError as error:
            last = error
    raise last


def build_actor(
    policy: CheckedPolicy,
    settings: Settings,
    run: RunSettings,
    spec: EnvSpec,
    *,
    sample: bool,
) -> Actor:
    """Return the policy's actor for environments with this spec, which must be the policy's."""
    # Imported here: torch takes seconds, and a wrong name should fail at once.
    import torch

    from steadyrl.agents.registry import Sample, finished_policy
    from steadyrl.envs.types import plain_spec
    from steadyrl.training.config.seeds import derive_seeds
    from steadyrl.training.run.hardware import (
        choose_device,
        prepare_arithmetic,
        prepare_device,
        thread_count,
    )

    validate_same_spaces(policy, run.env.id, plain_spec(spec), policy.spec)
    prepare_arithmetic(thread_count(run.threads, spec))
    try:
        device = torch.device(choose_device(run, settings.agent, spec))
    except SettingError as error:  # here it is an option
        reason = error.reason.replace("device=", "--device ")
        raise SettingError("--device", run.device, reason) from None
    prepare_device(run, device)  # as in training: cuDNN's own default is TF32
    drawn = Sample(spec.num_envs, derive_seeds(run.seed).agent) if sample else None
    try:
        return finished_policy(settings.agent, spec, policy.weights, device=device, sample=drawn)
    except ValueError as error:
        raise CheckpointError(f"{policy.path}: {error}") from error
