"""The format of what is saved, and how older ones are read: as what they were when written.

A key that is added, renamed or read otherwise makes a new format. What runs did before goes here,
because today's default need not be that; what is not known is refused (docs/RELIABILITY.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

from steadyrl.core.errors import SettingError
from steadyrl.training.config.schema import convert

FORMAT = 2

# Keys that format 1 had not got at first, and what runs did without.
ABSENT_IN_1: dict[str, Any] = {
    "seeds": None,
    "precision": "float32",
    "deterministic": False,
    "stop_timeout": "auto",
    "eval.num_envs": 10,
    "eval.video_every": 0,
    "log.wandb": False,
    "env.wrappers": [],
    "env.info_metrics": [],
    "env.action_masks": False,
    "env.image_axes": "auto",  # where another shape comes of it, the run is refused
    "env.image_range": None,
}
ABSENT_IN_1_FROM_BOTH = {
    "agent.network": {"trunk": "auto", "layer_norm": False, "init": "auto"},
    "agent.learning_rate_end": 0.0,
    "agent.learning_rate_warmup": 0.0,
    "agent.teacher": None,
    "agent.teacher_coef": 1.0,
    "agent.teacher_fraction": 0.5,
    "agent.teacher_leads": 0.0,
}
ABSENT_IN_1_FROM: dict[str, dict[str, Any]] = {
    "dqn": {
        **ABSENT_IN_1_FROM_BOTH,
        "agent.activation": "relu",
        "agent.anneal_epsilon": "linear",
        "agent.epsilon_warmup": 0.0,
        "agent.distribution": "none",
        "agent.atoms": 51,
        "agent.v_min": -10.0,
        "agent.v_max": 10.0,
        "agent.munchausen": False,
        "agent.munchausen_alpha": 0.9,
        "agent.munchausen_temperature": 0.03,
        "agent.munchausen_lowest": -1.0,
        "agent.noisy": False,
        "agent.noisy_sigma": 0.5,
        "agent.teacher_temperature": 1.0,
    },
    "ppo": {
        **ABSENT_IN_1_FROM_BOTH,
        "agent.clip_end": 0.0,
        "agent.clip_warmup": 0.0,
        "agent.anneal_entropy_coef": False,
        "agent.entropy_coef_end": 0.0,
        "agent.entropy_coef_warmup": 0.0,
        "agent.recurrent": "none",
        "agent.recurrent_size": 64,
        "agent.sequence_length": 16,
        "agent.value_norm": False,
        "agent.rnd_coef": 0.0,
        "agent.rnd_fraction": 1.0,
        "agent.rnd_gamma": 0.99,
    },
}


def translate(facts: Mapping[str, Any], saved_as: int) -> dict[str, Any]:
    """Return what a manifest of an older format says, in the words of today's.

    What cannot be read is left as it is: whoever needs it refuses it.
    """
    found = deepcopy(dict(facts))
    if saved_as == 1 and isinstance(found.get("config"), dict):
        found["config"] = with_keys_of_before(found["config"])
        _count_whole_batches(found["config"])
    if saved_as == 1 and isinstance(found.get("spec"), dict):
        found["spec"].setdefault("info_metrics", [])
    return found


def with_keys_of_before(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys that it may lack for its age, as runs did without."""
    found = deepcopy(dict(config))
    agent = found.get("agent")
    name = agent.get("name") if isinstance(agent, dict) else None
    keys = ABSENT_IN_1 | (ABSENT_IN_1_FROM.get(name, {}) if isinstance(name, str) else {})
    for key, value in keys.items():
        *groups, last = key.split(".")
        group: Any = found
        for each in groups:
            group = group.get(each) if isinstance(group, dict) else None
        if isinstance(group, dict):
            group.setdefault(last, deepcopy(value))
    return found


def _count_whole_batches(config: dict[str, Any]) -> None:
    """Give DQN the batch that it learned from: `grad_accumulation` of them were added up."""
    agent = config.get("agent")
    if not isinstance(agent, dict) or agent.get("name") != "dqn":
        return
    with suppress(SettingError):  # what is no number is refused by its key
        pieces = convert(int, agent.get("grad_accumulation"), "grad_accumulation")
        agent["batch_size"] = pieces * convert(int, agent.get("batch_size"), "batch_size")
