"""SteadyRL: train DQN and PPO agents on Gymnasium environments; use their policies from Python.

Importing the package imports nothing slow: torch is imported by the first `load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from steadyrl.training.policies.loaded import LoadedPolicy
    from steadyrl.training.run.run import RunResult

__all__ = ["load", "train"]


def train(overrides: Sequence[str] = (), *, quiet: bool = False) -> RunResult:
    """Train as the command does with these overrides; return summary, directory and policy.

    Raises ExpectedError (`steadyrl.core.errors`) where the command would end with an error. It
    installs no signal handlers and restores what it changes in the process. `quiet`: print nothing.
    """
    from steadyrl.loop import train as loop
    from steadyrl.training.api.embedded import train_embedded

    return train_embedded(loop, overrides, quiet=quiet)


def load(
    path: str | PathLike[str], *, best: bool = False, env: Sequence[str] = (), seed: int = 0
) -> LoadedPolicy:
    """Load the policy of a run's directory, or a `policy/` folder, on the CPU.

    `best`: policy-best/ of the run. `env`: KEY=VALUE below `env`, such as `id=my_module:Mine-v0`.
    `seed`: of the actions that are sampled.
    """
    from steadyrl.training.policies.loaded import load_policy

    return load_policy(path, best=best, overrides=env, seed=seed)
