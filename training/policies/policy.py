"""Metadata saved with checkpoints and policies, and rebuilding networks from it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadyrl.agents.actors.greedy import GreedyActor
from steadyrl.agents.base import Agent
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.networks.settings import NetworkSettings
from steadyrl.agents.registry import AgentSettings, agent_class, settings_type
from steadyrl.core.command.typed import installed_version
from steadyrl.core.errors import SettingError, show
from steadyrl.envs.types import EnvSpec, plain_spec, spec_of
from steadyrl.training.checkpoints.archive import most_agent_bytes, read_part
from steadyrl.training.checkpoints.manifest import CheckpointError, differences, verified_metadata
from steadyrl.training.checkpoints.resume import stored_config
from steadyrl.training.checkpoints.run_directory import LAST
from steadyrl.training.config.overrides import SHAPING, flatten
from steadyrl.training.config.schema import build
from steadyrl.training.logging.terminal import score
from steadyrl.training.policies.find import (
    AGENT,
    Policy,
    action_difference,
    find_policy,
    naming_the_other,
)

PACKAGES = ("steadyrl", "torch", "gymnasium", "numpy", "numba")


@dataclass(frozen=True)
class CheckedPolicy(Policy):
    """A policy whose weights are read and checked."""

    weights: dict[str, Tensor] = field(kw_only=True)


def read_policy(path: Path, *, best: bool = False) -> CheckedPolicy:
    """Read and check the policy at `path`, or the last (or best) one of the run at `path`."""
    found = find_policy(path, best=best)
    place = found.path
    with naming_the_other(place):
        # Of a checkpoint the replay is not read, and its agent is verified when it is.
        metadata = found.metadata if found.is_checkpoint else verified_metadata(place)
    stored_config(place, metadata)
    weights = read_weights(found)
    tensors = isinstance(weights, dict) and all(isinstance(t, Tensor) for t in weights.values())
    if not tensors:
        raise CheckpointError(f"{place}: not a policy")
    return CheckedPolicy(place, metadata, weights=weights)


def read_weights(policy: Policy) -> dict[str, Tensor]:
    """Read a policy's weights, which are the network of the agent in a checkpoint."""
    if not policy.is_checkpoint:
        with naming_the_other(policy.path):
            weights: dict[str, Tensor] = read_part(policy.path, LAST, most=policy.nbytes)
            return weights
    agent = read_part(policy.path, AGENT, most=most_agent_bytes(policy.nbytes))
    try:
        spec, settings = spec_of(policy.spec), agent_settings(policy.metadata["config"])
        module, _ = agent_class(settings.name).policy(settings, spec, torch.device("cpu"))
        network = FlatNetwork(module, torch.device("cpu"), learns=False)
        network.load_state_dict(agent["learner"]["network"])
    except (SettingError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{policy.path}: its policy cannot be rebuilt: {error}") from error
    return network.named()


def starting_policy(path: Path, metadata: Mapping[str, Any]) -> CheckedPolicy:
    """Return the policy at `path` (`init_from`), if its weights fit this run's network."""
    saved = find_policy(path).metadata
    if saved.get("weights") != metadata["weights"]:  # from the manifest: no file is read
        raise _unfit(path, saved, metadata)
    policy = read_policy(path)
    shapes = {name: list(tensor.shape) for name, tensor in policy.weights.items()}
    theirs = {"agent": policy.metadata.get("agent"), "weights": shapes}
    ours = {key: metadata[key] for key in theirs}
    wrong = differences(theirs, ours, theirs)
    if not wrong:  # equal shapes may still differ in meaning (activation, atoms, actions, …)
        try:
            theirs, ours = ({"network": network_of(of)} for of in (policy.metadata, metadata))
            wrong = differences(theirs, ours, theirs)
            wrong = wrong or action_difference(policy.spec, metadata["spec"])
        except (SettingError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{policy.path}: its configuration cannot be used: {error}"
            ) from error
    if wrong:
        raise CheckpointError(f"init_from={path}: does not fit this run: {wrong}")
    return policy


def trained(policy: Policy) -> str:
    """Return how long a policy was trained, and its evaluation: " (step 8,002, …)", or ""."""
    step, mean = policy.metadata.get("step"), policy.metadata.get("eval_return_mean")
    found = [f"step {step:,}"] if isinstance(step, int) else []
    found += [f"evaluated return {score(mean)}"] if isinstance(mean, int | float) else []
    return f" ({', '.join(found)})" if found else ""


def _unfit(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> CheckpointError:
    """Return an error of two lines: the weights that do not fit, and the settings that differ."""
    agents = differences(saved, here, ("agent",))
    found, ours = saved.get("weights"), here["weights"]
    there = found if isinstance(found, dict) else {}
    other = [name for name in {**there, **ours} if there.get(name) != ours.get(name)]
    name = other[0]
    first = f"{name} is {there.get(name, 'missing')} there and {ours.get(name, 'missing')} here"
    more = f", and {len(other) - 1} more weights differ" if len(other) > 1 else ""
    error = CheckpointError(f"init_from={path}: does not fit this run: {agents or first + more}")
    theirs, own = (dict(flatten(each.get("config") or {})) for each in (saved, here))
    changed = [
        f"{key}={show(theirs[key])} there and {show(value)} here"
        for key, value in own.items()
        if key.startswith(SHAPING) and theirs.get(key, value) != value
    ]
    return error.with_details(", ".join(changed)) if changed and not agents else error


class PolicyModule(nn.Module):
    """A policy as one module, from observations to environment actions."""

    def __init__(self, network: nn.Module, actor: GreedyActor) -> None:
        super().__init__()
        self.network = network  # registers its parameters with this module
        self._decide = actor.decide

    def forward(self, obs: Tensor) -> Tensor:
        """Return actions [N, …] for observations [N, …]."""
        return self._decide(obs)


def build_policy_module(policy: CheckedPolicy) -> tuple[PolicyModule, EnvSpec]:
    """Return the policy (network and greedy action choice) as one exportable module."""
    network, actor, spec = build_policy(policy, torch.device("cpu"))
    return PolicyModule(network, actor).requires_grad_(False), spec


def build_policy(
    policy: CheckedPolicy, device: torch.device
) -> tuple[nn.Module, GreedyActor, EnvSpec]:
    """Build the network, its greedy actor and the spec from a policy's metadata and weights.

    Raises SettingError for a policy with a hidden state.
    """
    try:
        spec = spec_of(policy.metadata["spec"])
        settings = agent_settings(policy.metadata["config"])
        cls = agent_class(settings.name)
        network, actor = cls.policy(settings, spec, device)
        network.load_state_dict(policy.weights)
    except (SettingError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{policy.path}: cannot be rebuilt: {error}") from error
    if not isinstance(actor, GreedyActor):
        cell = policy.metadata["config"]["agent"].get("recurrent", {}).get("cell")
        chosen = f" (agent.recurrent.cell={cell})" if cell else ""
        raise SettingError("policy", policy.path, f"has a hidden state{chosen}")
    return network, actor, spec


def network_of(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what defines a network besides its weight shapes; None if the agent has none."""
    agent = metadata["config"]["agent"]
    if "network" not in agent:
        return None
    network, spec = build(NetworkSettings, agent["network"], "agent.network."), metadata["spec"]
    says: dict[str, Any] = {
        "encoder": network.encoder_for(spec_of(spec).unmasked_shape),
        "layer_norm": network.layer_norm,
        "activation": network.activation,
    }
    # Meaning of the outputs: kind of return distribution, and the units of actions.
    if "distribution" in agent:
        returns = agent["distribution"]
        bounds = ("v_min", "v_max") if returns["kind"] == "c51" else ()
        says["distribution"] = {key: returns[key] for key in ("kind", *bounds)}
    if spec["action"]["kind"] == "BoxActions" and "scale_actions" in agent:
        says["scale_actions"] = agent["scale_actions"]
    return says


def agent_settings(config: Mapping[str, Any]) -> AgentSettings:
    """Return the agent settings of a stored configuration."""
    values = config["agent"]
    return build(settings_type(values["name"]), values, "agent.")


def run_metadata(config: Mapping[str, Any], spec: EnvSpec, agent: Agent) -> dict[str, Any]:
    """Return the metadata saved with a run's checkpoints, as plain JSON values."""
    return {
        "config": config,
        "agent": config["agent"]["name"],
        "spec": plain_spec(spec),
        "spaces": spec.spaces,
        "weights": {name: list(tensor.shape) for name, tensor in agent.weights().items()},
        "versions": {
            "python": platform.python_version(),
            **{package: installed_version(package) for package in PACKAGES},
        },
    }
