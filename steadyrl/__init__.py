"""SteadyRL: train DQN and PPO agents on Gymnasium environments; use their policies from Python.

Importing the package imports nothing slow: torch is imported by the first `load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from steadyrl.training.api.run_data import RunData
    from steadyrl.training.callbacks.callback import Callback
    from steadyrl.training.evaluation.evaluator import Evaluation
    from steadyrl.training.policies.loaded import LoadedPolicy
    from steadyrl.training.run.services import RunResult

__all__ = ["Callback", "evaluate", "load", "read", "train"]


def __getattr__(name: str) -> object:
    """Import `Callback` at its first use."""
    if name == "Callback":
        from steadyrl.training.callbacks.callback import Callback

        return Callback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__) + [name for name in globals() if name.startswith("__")]


def train(
    overrides: Sequence[str] = (), *, callbacks: Sequence[Callback] = (), quiet: bool = False
) -> RunResult:
    """Train as the command does with these overrides; return summary, directory and policy.

    Raises ExpectedError (`steadyrl.core.errors`) where the command would end with an error. It
    installs no signal handlers and restores what it changes in the process. `quiet`: print nothing.
    """
    from steadyrl.loop import train as loop
    from steadyrl.training.api.embedded import train_embedded

    return train_embedded(loop, overrides, callbacks=callbacks, quiet=quiet)


def load(
    path: str | PathLike[str], *, best: bool = False, env: Sequence[str] = (), seed: int = 0
) -> LoadedPolicy:
    """Load the policy of a run, a `policy/` folder, a checkpoint or an exported file, on the CPU.

    `best`: policy-best/ of the run. `env`: KEY=VALUE below `env`, such as `id=my_module:Mine-v0`.
    `seed`: of the actions that are sampled.
    """
    from steadyrl.training.policies.loaded import load_policy

    return load_policy(path, best=best, overrides=env, seed=seed)


def evaluate(
    policy: LoadedPolicy | str | PathLike[str],
    *,
    env: Sequence[str] = (),
    episodes: int | None = None,
    seed: int | None = None,
    deterministic: bool = True,
) -> Evaluation:
    """Play episodes with a policy (loaded, or a run's); return returns, lengths and an interval.

    `env`: KEY=VALUE below `env`. Episodes and seed are the run's own by default, so that the result
    is that of its last evaluation; a best policy, which those episodes chose, plays fresh ones.
    """
    from steadyrl.training.api.evaluation import evaluate_policy
    from steadyrl.training.policies.loaded import LoadedPolicy

    loaded = policy if isinstance(policy, LoadedPolicy) else load(policy, env=env)
    return evaluate_policy(
        loaded, env=env, episodes=episodes, seed=seed, deterministic=deterministic
    )


def read(run: str | PathLike[str]) -> RunData:
    """Read a run's directory: configuration, metrics as arrays, and summary."""
    from steadyrl.training.api.run_data import read_run_data

    return read_run_data(run)
