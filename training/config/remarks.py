"""Lines about valid settings that do less, or something else, than one may expect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.registry import (
    AgentSettings,
    HasUnusedKeys,
    HasUnusedKeysInRuns,
    WarnsOfRuns,
)
from steadyrl.core.command.typed import command_of
from steadyrl.envs.types import EnvSpec
from steadyrl.training.config.settings import CONFIGS, Settings

INITIAL = ("network.init", "log_std_init", "noisy.sigma")  # keys of initial weights, below `agent.`
# The environment or algorithm of a preset: `  - override /env: cartpole`.
PART = re.compile(r"^\s*- override /(env|agent): (\S+)\s*$", re.MULTILINE)


def remarks(
    typed: Sequence[str], settings: Settings, spec: EnvSpec, backend: Callable[[], str]
) -> Iterator[str]:
    """Yield a line for each setting with an unexpected effect.

    `typed`: the overrides; `spec`: of the environments of all ranks; `backend`: how they run.
    """
    given = dict(text.lstrip("+~").split("=", 1) for text in typed if "=" in text)
    env = settings.run.env
    yield from _other_task(given)
    yield from _without_effect(given, _unused(settings, spec))
    yield from _warnings(settings.agent, spec)
    yield from _support(given, settings.agent)
    if "env.step_timeout" in given and (name := backend()) != "async":
        yield (
            f"env.step_timeout={env.step_timeout:g} is not enforced: on env.backend={name} a step "
            "cannot be ended; env.backend=async can end it"
        )
    if env.kwargs.get("render_mode") == "human":
        yield (
            "env.kwargs.render_mode=human draws every training step, which slows training: "
            f"`{command_of('evaluate')} RUN --watch` shows the policy instead"
        )


def _other_task(given: Mapping[str, str]) -> Iterator[str]:
    """Yield a line if a preset of another environment or algorithm was chosen."""
    name = given.get("experiment", "")
    file = CONFIGS / "experiment" / f"{name}.yaml"
    if not name or not file.is_file():
        return
    for part, preset in PART.findall(file.read_text("utf-8")):
        key, own = part, preset
        if part == "env" and "env.id" in given:
            key, own = "env.id", _own_id(file, CONFIGS / "env" / f"{preset}.yaml")
        if own and given.get(key, own) != own:
            yield (
                f"experiment={name} was tuned for {key}={own}: its hyper-parameters are used with "
                f"{key}={given[key]}, for which they may not do"
            )


def _unused(settings: Settings, spec: EnvSpec) -> dict[str, str]:
    """Return the keys of the agent without effect, and why."""
    agent, found = settings.agent, dict[str, str]()
    if settings.run.init_from is not None:
        found |= dict.fromkeys(INITIAL, "init_from gives the weights")
    if isinstance(agent, HasUnusedKeysInRuns):
        found |= agent.unused_in(spec, settings.run.total_steps)
    if isinstance(agent, HasUnusedKeys):
        found |= agent.unused
    return found


def _warnings(agent: AgentSettings, spec: EnvSpec) -> list[str]:
    return agent.warnings_in(spec) if isinstance(agent, WarnsOfRuns) else []


def _without_effect(given: Mapping[str, str], unused: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each key that was typed and does nothing."""
    for name, why in unused.items():
        key = f"agent.{name}"
        if key in given:
            yield f"{key}={given[key]} has no effect: {why}"


def _support(given: Mapping[str, str], agent: AgentSettings) -> Iterator[str]:
    """Yield a line if C51 was chosen without a support for its returns."""
    bounds = ("agent.distribution.v_min", "agent.distribution.v_max")
    if not isinstance(agent, DQNSettings) or agent.clip_reward:
        return
    if given.get("agent.distribution.kind") == "c51" and not any(key in given for key in bounds):
        low, high = agent.distribution.v_min, agent.distribution.v_max
        yield (
            f"agent.distribution.kind=c51 represents discounted returns from {low:g} to {high:g}: "
            f"set {' and '.join(bounds)} to the range of this environment's"
        )


def _own_id(experiment: Path, env: Path) -> str:
    """Return the `env.id` that a preset was tuned for, "" if it is for any Atari game."""
    own = _id_of(experiment)
    return own if own or env.stem == "atari" else _id_of(env)


def _id_of(file: Path) -> str:
    """Return the `env.id` in a file of configs/experiment or configs/env, "" if there is none."""
    text = file.read_text("utf-8") if file.is_file() else ""
    found = re.search(r"^(?:env:\n  )?id: (\S+)", text, re.MULTILINE)
    return found[1] if found else ""
