"""Requirements of docs/adding-an-algorithm.md on every algorithm, and on a minimal one.

The outside A2C has no optional capability; registered algorithms declare theirs.
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
from documented import commands_of
from hydra.core.config_store import ConfigStore
from opened import job

from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.registry import (
    ALGORITHMS,
    HasBatchSize,
    Sample,
    SupportsCompile,
    SupportsMasks,
    SupportsRanks,
    agent_class,
    finished_policy,
    of_rank,
)
from steadyrl.core.errors import ExpectedError, SettingError
from steadyrl.envs.types import DiscreteActions
from steadyrl.training.cli.arguments import read
from steadyrl.training.setup import build

PAGE = ROOT / "docs" / "adding-an-algorithm.md"
FOLDERS = ("agents", "buffers", "core", "memory", "training", "tests")
# Modules, files, values of keys and names of torch.
NOT_OF_THE_CODE = {
    "agents",
    "budget",
    "dqn",
    "minatar",
    "mkdocs",
    "mlp",
    "pyproject",
    "toml",
    "yml",
}
RUN = ("env=cartpole", "env.num_envs=2", "device=cpu", "threads=1")
CPU = torch.device("cpu")


@pytest.fixture
def minimal_job(monkeypatch, tmp_path):
    """Yield a function that returns a job of the outside A2C."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "outside_algorithm"))
    chosen = read(["agent.name=outside.a2c"]).overrides
    yield lambda *more: job(tmp_path, *chosen, *RUN, *more, quick=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "outside"]:
        del sys.modules[name]
    ConfigStore.instance().repo.get("agent", {}).clear()


def job_of(name, folder, *more):
    return job(folder, *eager(name), *RUN, *small(name).short, *more, quick=False)


def play(env, agent, timesteps):
    """Act and learn for some timesteps; return whether an update returned metrics."""
    env.reset()
    actor, reported = agent.actor(env.spec.num_envs, explore=True), False
    for _ in range(timesteps):
        decision = actor.act(env.observation, env.episode_starts)
        agent.observe(decision, env.step(decision.env_action.numpy(force=True)))
        reported = agent.update() is not None or reported
    return reported


@pytest.mark.parametrize("name", NAMES)
def test_messages_name_no_other_algorithm(name):
    others = re.compile(rf"\bagent(?:\.name)?=(?!{name}\b)(?:{'|'.join(ALGORITHMS)})\b")
    for file in sorted((ROOT / "agents" / name).glob("*.py")):
        assert not others.findall(file.read_text()), file


@pytest.mark.parametrize("name", NAMES)
def test_settings_and_defaults_are_at_their_standard_paths(name):
    settings, module, cls, defaults, policy = ALGORITHMS[name]
    assert policy in (None, f"steadyrl.agents.{name}.policy")
    assert module == f"steadyrl.agents.{name}.agent" and defaults is None
    assert settings.__name__ == f"{cls}Settings"
    text = yaml.safe_load((ROOT / "configs" / "agent" / f"{name}.yaml").read_text())
    assert set(text) == {field.name for field in fields(settings)}


@pytest.mark.parametrize("name", NAMES)
def test_its_page_shows_a_command(name):
    page = ROOT / "docs" / f"{name}.md"
    shown = commands_of(page.read_text()) if page.is_file() else ()
    assert any(f"agent={name}" in words for words in shown), f"{page}: write agent={name} …"


@pytest.mark.parametrize("name", NAMES)
def test_small_test_overrides_are_keys_of_the_agent(name):
    sizes = small(name)
    typed = (*sizes.quick, *sizes.short, *sizes.stateful, *sizes.small_buffers, *sizes.large)
    agents = tuple(text for text in typed if not text.startswith("total_steps="))
    assert known(name, *agents) == agents


@pytest.mark.parametrize("name", [*NAMES, "minimal"])
def test_a_finished_policy_acts_like_its_agent(name, tmp_path, minimal_job):
    run_job = minimal_job() if name == "minimal" else job_of(name, tmp_path)
    with build(run_job) as (env, agent):
        assert play(env, agent, 120)
        found = finished_policy(run_job.settings.agent, env.spec, agent.weights(), device=CPU)
        expected = agent.actor(2, explore=False).act(env.observation, env.episode_starts).env_action
        assert torch.equal(found.act(env.observation, env.episode_starts).env_action, expected)


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_learns_on_with_an_empty_replay(name, tmp_path):
    with build(job_of(name, tmp_path)) as (env, agent):
        assert play(env, agent, 120)
        agent.drop_replay()
        assert agent.replay is None or len(agent.replay) == 0
        assert play(env, agent, 120)


@pytest.mark.parametrize("name", NAMES)
def test_policies_sample_if_the_agent_supports_it(name, tmp_path):
    run_job = job_of(name, tmp_path)
    with build(run_job) as (env, agent):
        env.reset()
        sizes = run_job.settings.agent, env.spec, agent.weights()
        draw = lambda: finished_policy(*sizes, device=CPU, sample=Sample(2, 0))  # noqa: E731
        if "sampling_policy" in vars(agent_class(name)):
            assert draw().act(env.observation, env.episode_starts).env_action.shape[0] == 2
        else:
            with pytest.raises(SettingError, match="cannot sample actions"):
                draw()


@pytest.mark.parametrize("name", NAMES)
def test_declared_capabilities_work(name, tmp_path):
    run_job = job_of(name, tmp_path)
    settings, spec = run_job.settings.agent, run_job.spec
    assert agent_class(name).__name__ == ALGORITHMS[name].cls
    if isinstance(settings, SupportsCompile):
        assert settings.expected_updates(spec, 10_000) > settings.expected_updates(spec, 1_000) > 0
    if isinstance(settings, HasBatchSize):
        assert settings.update_batch(spec) > 0
    if isinstance(settings, SupportsRanks):
        assert type(of_rank(settings, 0, 2)) is type(settings)


def test_actions_of_other_kinds_than_the_settings_name_are_refused(minimal_job, monkeypatch):
    settings = type(minimal_job().settings.agent)
    minimal_job("env=pendulum")
    monkeypatch.setattr(settings, "action_kinds", (DiscreteActions,), raising=False)
    reason = "needs discrete actions, but Pendulum-v1 has Box actions; try agent=ppo"
    with pytest.raises(SettingError, match=reason):
        minimal_job("env=pendulum")


def test_missing_capabilities_are_rejected_or_skipped(minimal_job):
    settings = minimal_job().settings.agent
    assert not isinstance(settings, SupportsRanks | SupportsMasks | SupportsCompile | HasBatchSize)
    with pytest.raises(SettingError, match="trains in one process only"):
        of_rank(settings, 0, 2)
    with pytest.raises(SettingError, match="does not support action masks"):
        minimal_job("env.action_masks=true")
    for key in ("agent.compile=true", "agent.teacher.policy=pole_teacher:Anywhere"):
        with pytest.raises(ExpectedError, match=r"no such key|is a key of"):
            minimal_job(f"++{key}")
    with build(minimal_job()) as (env, agent):
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


def update_without_stop_checks(agent):
    """Update as an algorithm that does not support interruption."""
    rollout = agent._rollout
    if not rollout.full:
        return None
    agent._compute_targets()
    for batch, _ in agent._minibatches(rollout, agent._shuffling):
        agent._learner.step(batch, agent.learning_rate)
    rollout.clear()
    return agent._learner.means()


def test_an_update_without_stop_checks_runs_to_its_end(minimal_job, monkeypatch):
    with build(minimal_job()) as (env, agent):
        monkeypatch.setattr(type(agent), "update", update_without_stop_checks)
        stop = Stop()
        agent.set_stop_flag(stop)
        stop.request()
        assert play(env, agent, 16) and agent.updates == 1


def test_an_agent_of_rollouts_keeps_its_update_due_if_it_is_to_stop(minimal_job):
    with build(minimal_job()) as (env, agent):
        stop = Stop()
        agent.set_stop_flag(stop)
        stop.request()
        assert not play(env, agent, 16) and agent.updates == 0
        stop.local = stop.confirmed = False
        assert agent.update() is not None and agent.updates == 1


def test_bf16_needs_no_support_by_the_algorithm(minimal_job):
    weights = []
    for precision in ("float32", "bf16"):
        with build(minimal_job(f"precision={precision}")) as (env, agent):
            assert play(env, agent, 33)
            weights.append(agent._learner.network.weights.clone())
    assert not torch.equal(*weights)


def test_tests_named_on_the_page_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())
    assert len([function for _, function in named if function]) > 10
    for file, function in named:
        text = (ROOT / file).read_text()
        assert not function or re.search(rf"^def {function}\(", text, re.M), (file, function)


def names_in_code():
    """Yield the names that the code defines or uses, without comments and docstrings."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                for attribute in ("name", "attr", "id", "arg"):
                    name = getattr(node, attribute, None)
                    yield from (part for part in str(name or "").split("."))


def test_names_used_on_the_page_exist_in_the_code():
    text = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.S)
    named = re.findall(r"`(?:self\.)?(_?[A-Za-z]\w*(?:\.\w+)*)(?:\([^`]*\))?(?: = \w+)?`", text)
    parts = {part for name in named for part in name.split(".")}
    assert len(parts) > 50 and "LossSpec" in parts
    known = {*names_in_code(), *NOT_OF_THE_CODE}
    assert sorted(parts - known) == []
