from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from steadyrl.core.errors import SettingError
from steadyrl.training.config.overrides import merge_overrides, without_hydra

STORED: dict[str, Any] = {
    "total_steps": 1000,
    "seed": 0,
    "device": "cpu",
    "precision": "float32",
    "deterministic": False,
    "run_dir": "/a",
    "resume": None,
    "eval": {"every": 100, "episodes": 5},
    "agent": {"name": "dqn", "gamma": 0.99, "compile": "auto", "replay": {"capacity": 10}},
    "env": {"id": "CartPole-v1", "num_envs": 1, "kwargs": {}},
}


def fresh(**changes: Any) -> dict[str, Any]:
    config = deepcopy(STORED)
    for key, value in changes.items():
        *groups, name = key.split("__")
        block = config
        for group in groups:
            block = block[group]
        block[name] = value
    return config


def test_settings_not_overridden_stay_unchanged() -> None:
    config, changes = merge_overrides(STORED, fresh(agent__gamma=0.5, total_steps=9), ["seed=0"])
    assert config == STORED
    assert changes == ()


def test_mutable_settings_are_applied_and_listed() -> None:
    new = fresh(total_steps=5000, eval__every=7, agent__compile="true", device="cuda:1")
    new |= {"precision": "bf16", "deterministic": True}
    typed = ["total_steps=5e3", "eval.every=7", "agent.compile=true", "device=cuda:1", "resume=/a"]
    typed += ["precision=bf16", "deterministic=true"]
    config, changes = merge_overrides(STORED, new, typed)
    assert config == new
    assert changes == (
        "agent.compile=true (was auto)",
        "deterministic=true (was false)",
        "device=cuda:1 (was cpu)",
        "eval.every=7 (was 100)",
        "precision=bf16 (was float32)",
        "total_steps=5000 (was 1000)",
    )
    assert STORED["eval"]["every"] == 100


def test_a_replay_goes_on_in_other_memory() -> None:
    stored = fresh(agent__replay={"capacity": 10, "device": "cuda"}, device="cuda")
    new = fresh(agent__replay={"capacity": 10, "device": "auto"})
    config, _ = merge_overrides(stored, new, ["device=cpu", "agent.replay.device=auto"])
    assert config == new  # where there is no card


@pytest.mark.parametrize(
    ("changes", "typed", "key"),
    [
        ({"agent__gamma": 0.9}, "agent.gamma=0.9", "agent.gamma"),
        ({"agent__replay": {"capacity": 20}}, "agent.replay.capacity=20", "agent.replay.capacity"),
        ({"agent__name": "ppo"}, "agent=ppo", "agent.name"),
        ({"env__id": "Acrobot-v1"}, "env=acrobot", "env.id"),
        ({"env__kwargs": {"x": 1}}, "++env.kwargs.x=1", "env.kwargs.x"),
        ({"seed": 3}, "seed=3", "seed"),
        ({"seed": 3}, "experiment=cartpole_ppo", "seed"),
    ],
)
def test_immutable_settings_are_rejected(changes: dict[str, Any], typed: str, key: str) -> None:
    with pytest.raises(SettingError, match="cannot change when a run is continued") as refused:
        merge_overrides(STORED, fresh(**changes), [typed])
    assert refused.value.field == key


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"agent__gamma": 0.9, "seed": 3}, True),
        ({"agent__name": "ppo"}, False),
        ({"env__id": "Pendulum-v1"}, False),
        ({"env__kwargs": {"x": 1}}, False),
        ({"agent__gamma": 0.9, "agent__hidden": [8]}, False),  # gamma is refused first
    ],
)
def test_only_a_policy_that_fits_is_advised_as_a_new_runs_start(
    changes: dict[str, Any], fits: bool
) -> None:
    with pytest.raises(SettingError, match="start a new run") as refused:
        merge_overrides(STORED, fresh(**changes), ["experiment=other"])
    advice = "; start a new run" + (", from this one's policy with init_from=…" if fits else "")
    assert refused.value.reason.endswith(advice)


def test_a_start_that_a_continued_run_cannot_have_is_refused() -> None:
    begun = fresh(init_from="/p")
    assert merge_overrides(begun, begun, ["init_from=/p", "resume=auto"]).changes == ()
    for stored in (begun, fresh(init_from=None)):
        with pytest.raises(SettingError, match="has no effect on a run that is continued"):
            merge_overrides(stored, fresh(init_from="/q"), ["init_from=/q", "resume=/a"])


def test_the_module_that_registers_the_environment_may_be_named() -> None:
    """A script has registered it; the command line imports a module."""
    new = fresh(env__id="mine:CartPole-v1")
    config, changes = merge_overrides(STORED, new, ["env.id=mine:CartPole-v1"])
    assert config == new and changes == ("env.id=mine:CartPole-v1 (was CartPole-v1)",)
    for other in ("mine:CartPole-v0", "CartPole-v0", "mine:Pole-v1"):
        with pytest.raises(SettingError, match="cannot change when a run is continued"):
            merge_overrides(STORED, fresh(env__id=other), [f"env.id={other}"])


def test_another_agent_is_refused_as_such_not_by_the_first_of_its_keys() -> None:
    new = fresh(agent__name="ppo", agent__activation="tanh")
    with pytest.raises(SettingError, match="cannot change when a run is continued") as refused:
        merge_overrides(STORED, new, ["agent=ppo"])
    assert refused.value.field == "agent.name"


def test_repeating_the_same_command_changes_nothing() -> None:
    typed = ["agent=dqn", "env=cartpole", "experiment=x", "seed=0", "run_dir=/a", "resume=auto"]
    config, changes = merge_overrides(STORED, fresh(resume="auto"), typed)
    assert config == STORED
    assert changes == ()


def test_overrides_of_hydra_itself_are_left_out() -> None:
    hydra = ["hydra.sweep.dir=a", "++hydra.job.chdir=true", "hydra/launcher=joblib", "~hydra/help"]
    assert without_hydra([*hydra, "seed=1", "+agent.hydra=2"]) == ["seed=1", "+agent.hydra=2"]
