"""What docs/ADDING_AN_ALGORITHM.md promises: of every algorithm, and of one that is bare.

A2C from outside has none of the optional capabilities; the registered ones say which they have.
"""

import ast
import re
import sys
from dataclasses import fields

import pytest
import torch
import yaml
from algorithms import NAMES, eager, known, small
from command import ROOT
from documented import commands
from hydra.core.config_store import ConfigStore
from opened import job

from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.registry import (
    ALGORITHMS,
    Batching,
    Compiling,
    Masking,
    Sample,
    Shareable,
    agent_class,
    finished_policy,
    of_rank,
)
from steadyrl.core.errors import ExpectedError, SettingError
from steadyrl.training.cli.arguments import read
from steadyrl.training.setup import build

PAGE = ROOT / "docs" / "ADDING_AN_ALGORITHM.md"
# Modules, files and what is torch's.
NOT_OF_THE_CODE = {"agents", "budget", "dqn", "pyproject", "toml", "to_empty"}
RUN = ("env=cartpole", "env.num_envs=2", "device=cpu", "threads=1")
CPU = torch.device("cpu")


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Return a job of A2C, with more overrides."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "outside_algorithm"))
    chosen = read(["agent.name=outside.a2c"]).overrides
    yield lambda *more: job(tmp_path, *chosen, *RUN, *more, quick=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "outside"]:
        del sys.modules[name]
    ConfigStore.instance().repo.get("agent", {}).clear()


def of(name, folder, *more):
    return job(folder, *eager(name), *RUN, *small(name).short, *more, quick=False)


def play(env, agent, rows):
    """Act and learn for some time steps; return whether an update reported."""
    env.reset()
    actor, reported = agent.actor(env.spec.num_envs, explore=True), False
    for _ in range(rows):
        decision = actor.act(env.observation, env.episode_starts)
        agent.observe(decision, env.step(decision.env_action.numpy(force=True)))
        reported = agent.update() is not None or reported
    return reported


@pytest.mark.parametrize("name", NAMES)
def test_its_files_and_its_defaults_are_where_they_are_looked_for(name):
    settings, module, cls, defaults = ALGORITHMS[name]
    assert module == f"steadyrl.agents.{name}.agent" and defaults is None
    assert (agent_class(name).__name__, settings.__name__) == (cls, f"{cls}Settings")
    text = yaml.safe_load((ROOT / "configs" / "agent" / f"{name}.yaml").read_text())
    network = {"network"} & {field.name for field in fields(settings)}
    assert set(text) - {"defaults"} | network == {field.name for field in fields(settings)}
    assert any(f"agent={name}" in command.text for command in commands()), "no page shows it"


@pytest.mark.parametrize("name", NAMES)
def test_its_small_overrides_are_keys_that_it_has(name):
    given = small(name)
    typed = (*given.quick, *given.short, *given.stateful, *given.small_buffers, *given.large)
    agents = tuple(text for text in typed if not text.startswith("total_steps="))
    assert known(name, *agents) == agents


@pytest.mark.parametrize("name", NAMES)
def test_a_finished_policy_decides_as_the_agent_that_gave_it(name, tmp_path):
    with build(of(name, tmp_path)) as (env, agent):
        assert play(env, agent, 120)
        found = finished_policy(agent._settings, env.spec, agent.weights(), device=CPU)
        expected = agent.actor(2, explore=False).act(env.observation, env.episode_starts).env_action
        assert torch.equal(found.act(env.observation, env.episode_starts).env_action, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_is_drawn_from_where_it_says_how(name, tmp_path):
    with build(of(name, tmp_path)) as (env, agent):
        env.reset()
        given = agent._settings, env.spec, agent.weights()
        draw = lambda: finished_policy(*given, device=CPU, sample=Sample(2, 0))  # noqa: E731
        if "sampling_policy" in vars(agent_class(name)):
            assert draw().act(env.observation, env.episode_starts).env_action.shape[0] == 2
        else:
            with pytest.raises(SettingError, match="cannot sample actions"):
                draw()


@pytest.mark.parametrize("name", NAMES)
def test_what_its_settings_offer_can_be_asked_of_them(name, tmp_path):
    told = of(name, tmp_path)
    settings, spec = told.settings.agent, told.spec
    if isinstance(settings, Compiling):
        assert settings.expected_updates(spec, 10_000) > settings.expected_updates(spec, 1_000) > 0
    if isinstance(settings, Batching):
        assert settings.update_batch(spec) > 0
    if isinstance(settings, Shareable):
        assert type(of_rank(settings, 0, 2)) is type(settings)


def test_what_an_algorithm_does_not_offer_is_refused_or_left_out(bare):
    settings = bare().settings.agent
    assert not isinstance(settings, Shareable | Masking | Compiling | Batching)
    with pytest.raises(SettingError, match="trains in one process only"):
        of_rank(settings, 0, 2)
    with pytest.raises(SettingError, match="does not support action masks"):
        bare("env.action_masks=true")
    for key in ("agent.compile=true", "agent.teacher.policy=pole_teacher:Anywhere"):
        with pytest.raises(ExpectedError, match=r"no such key|is a key of"):
            bare(f"++{key}")
    with build(bare()) as (env, agent):
        env.reset()
        decision = agent.actor(2, explore=True).act(env.observation, env.episode_starts)
        assert agent.collect_block(decision, None, 100) is None
        assert (
            agent.replay is None
            and not agent.can_update_during_step
            and not agent.has_pending_updates
        )
        with pytest.raises(SettingError, match="cannot sample actions"):
            finished_policy(settings, env.spec, agent.weights(), device=CPU, sample=Sample(2, 0))


def test_an_update_that_does_not_look_for_the_runs_end_is_finished(bare):
    with build(bare()) as (env, agent):
        stop = Stop()
        agent.set_stop_flag(stop)
        stop.request()
        assert play(env, agent, 16) and agent.updates == 1


def test_a_forward_pass_in_bf16_needs_nothing_of_an_algorithm(bare):
    weights = []
    for precision in ("float32", "bf16"):
        with build(bare(f"precision={precision}")) as (env, agent):
            assert play(env, agent, 33)
            weights.append(agent._learner.network.weights.clone())
    assert not torch.equal(*weights)


def test_the_tests_that_the_page_names_are_there():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())
    assert len([function for _, function in named if function]) > 10
    for file, function in named:
        text = (ROOT / file).read_text()
        assert not function or re.search(rf"^def {function}\(", text, re.M), (file, function)


def names_in_code():
    """Return the names that the code defines or uses: no comment, no docstring counts."""
    for floor in ("agents", "buffers", "core", "memory", "training", "tests/helpers"):
        for path in (ROOT / floor).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                for attribute in ("name", "attr", "id", "arg"):
                    name = getattr(node, attribute, None)
                    yield from (part for part in str(name or "").split("."))


def test_the_names_that_the_page_uses_are_those_of_the_code():
    text = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.S)
    named = re.findall(r"`(?:self\.)?(_?[A-Za-z]\w*(?:\.\w+)*)(?:\([^`]*\))?(?: = \w+)?`", text)
    parts = {part for name in named for part in name.split(".")}
    assert len(parts) > 50 and "LossSpec" in parts
    known = {*names_in_code(), *NOT_OF_THE_CODE}
    assert sorted(parts - known) == []
