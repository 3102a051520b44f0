"""Hints for values of blocks and for names of other trainers name existing keys."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import gymnasium as gym
import pytest
from omegaconf import OmegaConf
from refused import refusal

from steadyrl.agents.registry import ALGORITHMS, Algorithm, settings_type
from steadyrl.command import command
from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import SettingError
from steadyrl.envs.registration import find_spec
from steadyrl.training.cli.main import main
from steadyrl.training.config.hints.keys import unknown_key
from steadyrl.training.config.hints.other_trainers import (
    ABSENT,
    MAIN_KEYS,
    OTHERS,
    SB3,
    SWITCHES,
    VARIANTS,
    why_absent,
)
from steadyrl.training.config.settings import RunSettings, load_settings
from steadyrl.training.run.job import compose_one

ROOT = Path(__file__).parents[4]


def flatten(cls: Any, path: str) -> Iterator[str]:
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from flatten(hint, f"{path}{name}.")
        else:
            yield path + name


KEYS = {
    name: {"agent", *flatten(RunSettings, ""), *flatten(settings_type(name), "agent.")}
    for name in ALGORITHMS
}


def unit(key: str) -> str:
    """Return what a hint says of keys that others count in calls, iterations or episodes."""
    steps = {"eval.every", "log.every", "checkpoint.every", "eval.video_every"}
    steps |= {"agent.train_every", "agent.target_every"}
    return " (in environment steps)" if key in steps else ""


def settings(*overrides: str) -> Any:
    """Return the settings of a command with these overrides."""
    values = OmegaConf.to_container(compose_one(list(overrides)), resolve=True)
    assert isinstance(values, dict)
    values.pop("experiment", None)
    return load_settings({str(key): value for key, value in values.items()})


@pytest.mark.parametrize(("block", "key"), MAIN_KEYS.items())
def test_a_value_for_a_block_gives_a_hint_to_its_main_key(block: str, key: str) -> None:
    agents = [name for name, keys in KEYS.items() if key in keys]
    assert agents
    for name in agents:
        assert key.startswith(f"{block}.")
        with pytest.raises(SettingError) as refused:
            settings(f"agent={name}", f"{block}=5")
        assert str(refused.value) == f"{block}=5: is a group of keys: write {key}=5"


@pytest.mark.parametrize("name", OTHERS, ids=lambda name: f"{name.name}-{name.agent}")
def test_names_of_other_trainers_give_a_hint_to_ours(name: Any) -> None:
    agents = [agent for agent in ALGORITHMS if name.key in KEYS[agent]]
    assert agents and name.agent in (None, *agents)
    for agent in agents:
        for typed in (name.name, f"agent.{name.name}"):
            if typed not in KEYS[agent]:
                others = [o for o in OTHERS if o.name == name.name and o.key not in KEYS[agent]]
                also = "".join(f" (agent={other.agent} has {other.key})" for other in others)
                hint = f"no such key; did you mean {name.key}?{unit(name.key)}{also}"
                assert unknown_key(typed, agent) == hint


@pytest.mark.parametrize("name", ABSENT, ids=lambda name: name.name)
@pytest.mark.parametrize("agent", ALGORITHMS)
def test_names_without_a_key_are_told_why(
    name: Any, agent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name.name not in {each.name for each in OTHERS}
    assert name.name not in KEYS[agent]
    for key in re.findall(r"(?:agent|log|env)\.[a-z_.]+", name.why):
        assert any(known == key or known.startswith(f"{key}.") for known in KEYS[agent])
    typed = f"{name.name}=200"
    monkeypatch.setattr(sys, "argv", ["train.py", f"agent={agent}", typed])
    why = name.why.replace("{value}", "200").replace("{{", "{").replace("}}", "}")
    assert refusal(capsys) == f"error: {typed}: no such key; {why}"
    option = f"--{name.name.replace('_', '-')}"
    monkeypatch.setattr(sys, "argv", ["train.py", f"agent={agent}", option, "200"])
    assert refusal(capsys) == f"error: {option}: no such option; {why}"


def test_a_limit_of_steps_is_written_as_told() -> None:
    why = why_absent("max_episode_steps", "200")
    assert why is not None
    [wrapper] = settings(why.removeprefix("write '").removesuffix("'")).run.env.wrappers
    assert wrapper == {"TimeLimit": {"max_episode_steps": 200}}


@pytest.mark.parametrize(("name", "written"), VARIANTS.items())
def test_variants_of_agents_are_told_as_keys(
    name: str, written: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settings(*written.split())
    monkeypatch.setattr(sys, "argv", ["train.py", f"agent={name}"])
    note = ", with the range of your discounted returns" if name == "c51" else ""
    assert refusal(capsys) == f"error: agent={name}: no such agent; write {written}{note}"


@pytest.mark.parametrize(
    "name", [n for n in OTHERS if n.agent], ids=lambda n: f"{n.name}-{n.agent}"
)
def test_names_of_another_agent_are_said_to_be_its(name: Any) -> None:
    """`agent.clip_coef` with dqn: not what looks alike of its own (`agent.clip_reward`)."""
    for agent in ALGORITHMS:
        if any(each.name == name.name and each.key in KEYS[agent] for each in OTHERS):
            continue  # has a meaning of its own there
        for typed in (name.name, f"agent.{name.name}"):
            owners = [other for other, keys in KEYS.items() if typed in keys]
            whose = f", a key of {name.agent}"
            hint = unknown_key(typed, agent)
            if not owners:
                assert hint == f"no such key; did you mean {name.key}{whose}?{unit(name.key)}"


@dataclasses.dataclass(frozen=True)
class OffPolicySettings:
    """An algorithm besides ours that shares a key with DQN."""

    name: str
    train_every: int

    def validate_fit(self, spec: Any, total_steps: int) -> None:
        """Check nothing."""


def test_hints_go_by_the_keys_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "other", Algorithm(OffPolicySettings, "other", "Other"))
    hint = "did you mean agent.train_every? (in environment steps) (agent=ppo has agent.rollout_"
    assert unknown_key("step_per_collect", "other").startswith(f"no such key; {hint}")


def test_names_of_other_trainers_are_unique_per_agent() -> None:
    for agent in ALGORITHMS:
        names = [each.name for each in OTHERS if each.key in KEYS[agent]]
        assert len(names) == len(set(names))


def test_names_without_a_key_are_no_keys() -> None:
    """An algorithm that comes later may bring one."""
    own = set().union(*KEYS.values())
    assert own.isdisjoint(f"agent.{name.name}" for name in ABSENT)


def test_configuration_page_lists_every_foreign_name() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    for name in ABSENT:
        assert f"| `{name.name}` | {name.of} | {name.reason('…')} | |" in page
    for each in OTHERS:
        assert f"| `{each.name}` | {each.of} | `{each.key}` | {each.agent or ''} |" in page


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (
            "agent.noisy=true agent.noisy.sigma=0.2",
            "agent.noisy=true: is a group of keys: write agent.noisy.enabled=true",
        ),
        ("agent/network=impala", "agent/network=impala: no such key; it is agent.network.encoder"),
        ("agent=ppo n_steps=3", "n_steps=3: no such key; did you mean agent.rollout_steps?"),
        (
            "n_steps=3",
            "no such key; did you mean agent.n_step? (agent=ppo has agent.rollout_steps)",
        ),
        ("agent=ppo agent.target_kl=None", "agent.target_kl=None: must be a number; write null"),
        (
            "agent=ppo agent.normalize_obs=None",
            "agent.normalize_obs=None: must be true or false; write null",
        ),
        ("agent.learning_rate=linear", "a number; write agent.anneal_learning_rate=linear"),
        (
            "agent.learning_rate=lin_0.001",
            "write agent.learning_rate=0.001 agent.anneal_learning_rate=linear",
        ),
        (
            "agent=ppo agent.clip=lin_0.2",
            "must be a number; write agent.clip=0.2 agent.anneal_clip=linear",
        ),
        ("net_arch=64,64", "net_arch=64,64: a list has brackets: 'agent.hidden=[64,64]'"),
        ("hidden=64,64", "hidden=64,64: a list has brackets: 'agent.hidden=[64,64]'"),
        ("agent=PPO", "agent=PPO: no such agent; did you mean ppo?"),
        ("-n 1000", "-n: no such option; --cfg job prints all keys"),
        ("--nonsense 3", "--nonsense: no such option; --cfg job prints all keys"),
        ("--clip-range 0.2", "no such option; did you mean agent.clip, a key of ppo?"),
        (
            "--n-steps 9",
            "keys are written without dashes: agent.n_step=9 (agent=ppo has agent.rollout_steps)",
        ),
        ("--experiment cartpole_ppo", "without dashes: experiment=cartpole_ppo"),
        ("experiment=cartpole_ppo --n-steps 9", "without dashes: agent.rollout_steps=9"),
        ("agent=ppo --n-steps 9", "without dashes: agent.rollout_steps=9"),
        ("run_name=2026", "run_name=2026: must be text: write 'run_name=\"2026\"'"),
        ("expriment=cartpole_dqn", "no such key; did you mean experiment?"),
        ("--n-eval-envs 2", "keys are written without dashes: eval.num_envs=2"),
        ("clip_coef=0.2", "did you mean agent.clip, a key of ppo?"),
        ("agent.rnd=0.5", "is a key of ppo, and the agent is dqn"),
        ("agent.rnd.coeff=2", "no such key; did you mean agent.rnd.coef, a key of ppo?"),
        ("agent.replay.size=100", "no such key; agent.replay has capacity, prioritized,"),
        ("agent.per=true", "no such key; did you mean agent.replay.prioritized?"),
        ("agent.replay=5", "agent.replay=5: is a group of keys, not a value"),
        (
            "agent.anneal_learning_rate=true",
            "must be one of constant, linear, cosine; write agent.anneal_learning_rate=linear",
        ),
        ("agent.optimizer=radam", "is a group of keys: write agent.optimizer.name=radam"),
        ("agent.optimizer.name=adamm", "must be one of adam, adamw, radam, muon"),
        (
            "agent.optimizer.momentum=0.9",
            "no such key; agent.optimizer has name, eps, weight_decay",
        ),
        ("agent.adam_eps=1e-4", "no such key; did you mean agent.optimizer.eps?"),
        ("seeds=1", "must be a list of integers: write seeds=[1]"),
        ("seeds=3", "integers: write 'seeds=[0,1,2]' for 3 seeds, seed=3 for one"),
        ("seeds=500", "integers: write -m 'seed=range(0,500)' for 500 seeds, seed=500 for one"),
        ("seeds=1e3", "-m 'seed=range(0,1000)' for 1,000 seeds, seed=1000 for one"),
        ("seeds=10k", "-m 'seed=range(0,10000)' for 10,000 seeds, seed=10000 for one"),
        ("seeds=0-40", "must be a list of integers: write -m 'seed=range(0,41)'"),
        ("env.image_range=0-4", "must be a list of numbers: write 'env.image_range=[0,4]'"),
        ("seeds=2..4", "must be a list of integers: write 'seeds=[2,3,4]'"),
        ("total_steps=10k", "must be an integer: write 10_000 or 10e3"),
        ("total_steps=1.5M", "must be an integer: write 1_500_000 or 1.5e6"),
        ("total_steps=0.0001k", "total_steps=0.0001k: must be an integer"),
        ("total_steps=10,000", "(in Python: call train for each); one number is 10_000"),
        ("seed=0,1", "several values are one run each: add -m (in Python: call train for each)"),
        ("-m seed=0..4", "must be an integer: one run for each is -m 'seed=range(0,5)'"),
        ("seed=0-4", "must be an integer: one run for each is -m 'seed=range(0,5)'"),
        ("env.kwargs=[1]", "env.kwargs=[1]: must be a mapping, such as {key: value}"),
        ("agent.optimizer=[1]", "agent.optimizer=[1]: must be a mapping, such as {key: value}"),
        ("agent.hidden={a:1}", "agent.hidden={a:1}: must be a list"),
        ("agent.optimizer.eps=0", "agent.optimizer.eps=0: must be between 1e-30 and 1"),
    ],
)
def test_wrong_keys_and_values_are_rejected_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, line: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *typed.split()])
    assert line in refusal(capsys)


@pytest.mark.parametrize(
    "typed",
    [
        "seeds=1e30", "seeds=-1", "seeds=1.5", "seeds=all", "seeds=true", "seeds=0-99999999",
        "env.image_range=255", "env.image_range=4-0", "env.image_range=10k",
        "agent.hidden=10k", "agent.hidden=-8", "agent.hidden=1.5", "env.info_metrics=5",
    ],
)  # fmt: skip
def test_no_list_is_proposed_that_would_be_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", typed])
    assert refusal(capsys).endswith(("list of integers", "list of numbers", "list of texts"))


@pytest.mark.parametrize(
    "typed", ["seeds=0", "seeds=1e0", "seeds=2-4", "seeds=0.01k", "env.image_range=0..255",
              "agent.hidden=1e2", "env.wrappers=TimeLimit"]
)  # fmt: skip
def test_a_proposed_list_is_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", typed])
    proposed = refusal(capsys).partition(": write ")[2].partition(" for ")[0].strip("'")
    assert proposed.startswith(typed.partition("=")[0])
    settings(proposed)


@pytest.mark.parametrize("value", ["[1]", "{a: 1}", "[constant]"])
@pytest.mark.parametrize("key", ["agent.anneal_learning_rate", "agent.network.init", "device"])
def test_a_list_or_dict_in_place_of_a_choice_is_rejected_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "agent=ppo", f"{key}={value}"])
    assert key in refusal(capsys)


@pytest.mark.parametrize("written", ["10_000", "10e3", "1e4"])
def test_numbers_are_read_as_hints_write_them(written: str) -> None:
    assert settings(f"total_steps={written}").run.total_steps == 10_000


def test_a_preset_whose_override_has_no_slash_is_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override agent: ppo\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    typed = ["train.py", "--config-dir", str(tmp_path), "experiment=mine"]
    monkeypatch.setattr(sys, "argv", typed)
    assert refusal(capsys).endswith("mine: has 'override agent': write 'override /agent'")


def test_a_key_with_a_space_is_told_to_be_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "override agent=ppo"])
    assert refusal(capsys).endswith("'override agent' is no key: write agent=ppo")


@pytest.mark.parametrize(
    "typed",
    [
        ["total_steps = 2000"],
        ["total_steps", "=", "2000"],
        ["total_steps=", "2000"],
        ["total_steps", "=2000"],
    ],
)
def test_spaces_around_an_equals_sign_are_refused(
    typed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "agent=ppo", *typed, "seed=3"])
    write = "write total_steps=2000, without spaces around ="
    assert refusal(capsys) == f"error: {' '.join(typed)}: {write}"


def test_a_hint_for_several_overrides_in_one_word_has_no_space(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "agent.gamma = 0.9 seed=3"])
    assert refusal(capsys).endswith("'agent.gamma ' is no key: write agent.gamma=0.9 seed=3")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ('env.kwargs={"a": 1}', "'env.kwargs={a: 1}'"),
        ("env.kwargs={'a': {'b': 1}}", "'env.kwargs={a: {b: 1}}'"),
        ("env.kwargs={a=1, b=[2]}", "'env.kwargs={a: 1, b: [2]}'"),
        ('env.wrappers=[{"mine:W": {"a": 1}}]', "'env.wrappers=[{mine:W: {a: 1}}]'"),
        ("env.kwargs.bug: hang", "env.kwargs.bug: hang: cannot be read; write env.kwargs.bug=hang"),
        ("env.wrappers=TimeLimit", "write env.wrappers=[TimeLimit]"),
    ],
)
def test_mappings_and_lists_of_other_languages_are_written_as_they_are_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, hint: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", typed])
    line = refusal(capsys)
    assert hint in line and "++" not in line


def test_a_program_that_is_misspelled_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["steadyrl", "evalute", "outputs"])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    expected = "error: evalute: no such program; did you mean evaluate?\n"
    assert capsys.readouterr().err == expected


def test_an_id_that_its_module_lacks_is_not_taken_for_one_of_gymnasium() -> None:
    with pytest.raises(SettingError) as refused:
        find_spec("json:Nope-v0")
    assert refused.value.reason == "no such environment: json registers no such id"


def test_a_class_that_its_module_does_not_register_is_refused_with_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import gymnasium as gym\nclass Reach(gym.Env): pass\nclass Plain: pass\n"
    (tmp_path / "own_reach.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def reason(name: str) -> str:
        with pytest.raises(SettingError) as refused:
            find_spec(f"own_reach:{name}")
        return refused.value.reason.removeprefix("no such environment")

    add = 'own_reach has a class Reach: add gym.register("Reach-v0", Reach) there'
    assert reason("Reach") == f": {add} and write env.id=own_reach:Reach-v0"
    for name in ("Plain", "Other"):  # no environment
        assert reason(name) == ": own_reach registers no such id"
    for entry in ("own_reach:Reach", sys.modules["own_reach"].Reach):
        gym.register("Reach-v1", entry)
        assert reason("Reach") == ", did you mean own_reach:Reach-v1?"
        gym.registry.pop("Reach-v1")


def test_a_module_that_registers_with_old_gym_alone_is_told_of_it(tmp_path, monkeypatch) -> None:
    """As Crafter does, which has no ids without old Gym, and says nothing."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "gym", None)  # not installed
    (tmp_path / "crafts.py").write_text("try:\n  import gym\nexcept ImportError:\n  pass\n")
    (tmp_path / "plain.py").write_text("import gymnasium\n")
    absent = "it registers with gym, its predecessor, which is not installed: write a gymnasium.Env"
    for module, hinted in (("crafts", True), ("plain", False)):
        with pytest.raises(SettingError, match=f"{module} registers no such id") as refused:
            find_spec(f"{module}:Crafts-v1")
        assert (absent in str(refused.value)) is hinted


def test_an_id_that_may_be_of_old_gym_is_hinted_at(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gym", ModuleType("gym"))
    with pytest.raises(SettingError) as refused:
        find_spec("json:Nope-v0")
    kwargs = 'env_id: "json:Nope-v0", make_kwargs: {disable_env_checker: true}'
    hint = f"env.id=shimmy:GymV26Environment-v0 'env.kwargs={{{kwargs}}}'"
    assert "registers no such id with Gymnasium" in refused.value.reason
    assert hint in refused.value.reason


PRESETS = {
    "agent:\n  gamma: 1.5\n": ["error: agent.gamma=1.5: must be between 0 and 1", "  {}, line 5"],
    "seed: 3\nagent:\n  gamma: much\n": [
        "error: agent.gamma=much: must be a number",
        "  {}, line 6",
    ],
    "agent:\n  clip_coef: 0.2\n": [
        "error: experiment=mine: agent.clip_coef: no such key; did you mean agent.clip, a key of",
        "  {}, line 5",
    ],
    "agent:\n  gamma: [0.9\n  batch_size: 3\n": ["error: {}, line 6: cannot be read: "],
    "seed: 1\nseed: 2\n": ["error: {}, line 5: cannot be read: found duplicate key seed"],
    "seed: 1\n\tagent: 3\n": ["error: {}, line 5: cannot be read: "],
}


def preset_refusal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *typed: str
) -> list[str]:
    """Return the lines with which a command with presets of `folder` is refused."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir", str(folder), *typed])
    with pytest.raises(SystemExit) as ended:
        main(lambda _: pytest.fail("the command was accepted"))
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("text", "lines"), PRESETS.items())
def test_errors_in_a_preset_name_file_and_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    lines: list[str],
) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\ndefaults:\n  - override /agent: dqn\n{text}")
    found = preset_refusal(tmp_path, monkeypatch, capsys, "experiment=mine")
    assert len(found) == len(lines)
    assert all(
        line.startswith(known.format(file)) for line, known in zip(found, lines, strict=True)
    )
    if "gamma: 1.5" in text:  # what is typed is no fault of the file
        typed = ("experiment=mine", "agent.gamma=2")
        [line] = preset_refusal(tmp_path, monkeypatch, capsys, *typed)
        assert "agent.gamma=2" in line


@pytest.mark.parametrize(
    ("place", "text", "typed", "line"),
    [
        ("experiment", "total_steps: 9\n", "experiment=mine", "first line: # @package _global_"),
        (
            "experiment",
            "# @package _global_\ndefaults:\n  - override /agent: dnq\n",
            "experiment=mine",
            "experiment=mine: override /agent=dnq: no such agent; did you mean dqn?",
        ),
        ("experiment", "# @package _global_\n- seed\n", "experiment=mine", "DictConfig"),
        ("env", "id: CartPole-v1\nnum_env: 3\n", "env=mine", "mine.yaml, line 2"),
    ],
)
def test_presets_that_cannot_be_used_are_told_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    text: str,
    typed: str,
    line: str,
) -> None:
    (tmp_path / place).mkdir()
    (tmp_path / place / "mine.yaml").write_text(text)
    assert line in "\n".join(preset_refusal(tmp_path, monkeypatch, capsys, typed))


def hint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    """Return what the refusal of a command says to write."""
    monkeypatch.setattr(sys, "argv", ["train.py", *typed])
    return refusal(capsys).rpartition(": ")[2].removeprefix("no such key; write ")


def refused_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *typed: str
) -> list[str]:
    """Return the lines that a command is refused with."""
    monkeypatch.setattr(sys, "argv", ["train.py", *typed])
    with pytest.raises(SystemExit) as ended:
        main(lambda _: pytest.fail("the command was accepted"))
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_a_key_of_other_agents_is_named_as_such_whatever_other_trainers_call_so() -> None:
    """`policy` is Stable-Baselines3's, too."""
    hint = "is a key of dqn and ppo, and the agent is outside.a2c"
    assert unknown_key("agent.teacher.policy", "outside.a2c") == hint


def test_all_unknown_keys_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "env=cartpole n_steps=128 seed=3 ent_coef=0 env.kwargs.x=1 verbose=1 clip_range=.2"
    first, *lines = refused_lines(monkeypatch, capsys, "agent=ppo", *typed.split())
    assert first == "error: n_steps=128: no such key; did you mean agent.rollout_steps?" + (
        " (agent=dqn has agent.n_step)"
    )
    assert [line.split(":")[0] for line in lines] == [
        "  ent_coef=0",
        "  verbose=1",
        "  clip_range=.2",
    ]
    assert lines[-1].endswith("did you mean agent.clip?")


def test_all_unknown_options_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "--total-timesteps 1e5 --nonsense -3 seed=1 --track --clip-coef=0.2 --nonsense 4"
    dashes = "no such option; keys are written without dashes:"
    assert refused_lines(monkeypatch, capsys, "agent=ppo", *typed.split()) == [
        f"error: --total-timesteps: {dashes} total_steps=1e5",
        "  --nonsense: no such option; --cfg job prints all keys",
        f"  --track: {dashes} log.wandb.enabled=true",
        f"  --clip-coef=0.2: {dashes} agent.clip=0.2",
    ]


@pytest.mark.parametrize("dashes", ["--", ""])
def test_more_unknown_keys_than_are_shown_are_counted(
    dashes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [f"{dashes}nonsense{k}=3" for k in range(13)]
    first, *lines = refused_lines(monkeypatch, capsys, *typed)
    assert "nonsense0=3" in first and "nonsense9=3" in lines[8]
    assert lines[9:] == ["  … and 3 more"]


def test_no_line_with_a_hint_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a command for CleanRL, and of a configuration of Stable-Baselines3."""
    known = ["--env-id=CartPole-v1", "--total-timesteps=1e4", "--num-envs=4", "--num-steps=128"]
    known += ["--num-minibatches=4", "--update-epochs=4", "--clip-coef=0.2", "--ent-coef=0.01"]
    known += ["--vf-coef=0.5", "--norm-adv", "--anneal-lr", "--gae-lambda=0.95", "--gamma=0.99"]
    known += ["--seed=1", "--track", "--capture-video", "--exp-name=first"]
    others = [f"--nonsense{k}=3" for k in range(11)]
    lines = refused_lines(monkeypatch, capsys, "agent=ppo", *others, *known)
    shown = [line.removeprefix("error: ").strip().partition(": ")[0] for line in lines]
    assert shown == [*others[:10], *known, "… and 1 more"]
    names = [each.name for each in OTHERS if each.of == SB3 and each.agent in (None, "ppo")]
    typed = [f"{name}=1" for name in names]
    first, *lines = refused_lines(monkeypatch, capsys, "agent=ppo", *typed)
    assert first.startswith("error: ") and len(lines) == len(names) - 1 > 10


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (
            "agent=ppo env=cartpole",
            "holds several overrides; write them apart: 'agent=ppo', 'env=cartpole'",
        ),
        ("env=cartpole_dqn", "is a preset of experiment: write experiment=cartpole_dqn"),
        ("experiment=cartpole", "is a preset of env: write env=cartpole"),
    ],
)
def test_what_was_meant_is_named(
    typed: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused_lines(monkeypatch, capsys, typed) == [f"error: {typed}: {line}"]


@pytest.mark.parametrize("agent", ALGORITHMS)
def test_a_letter_left_out_of_any_key_is_found(agent: str) -> None:
    known, spelled = KEYS[agent], re.compile(r"\w{6,}")
    keys = [key for key in known if spelled.search(key.rpartition(".")[2])]
    for key in keys:
        group, dot, name = key.rpartition(".")
        typo = f"{group}{dot}{name[:2]}{name[3:]}"
        assert f"did you mean {key}?" in unknown_key(typo, agent)


@pytest.mark.parametrize(
    "name", ["log_path", "wandb_run", "sampler", "save_path", "monitor_dir", "dual_mode"]
)
@pytest.mark.parametrize("agent", ALGORITHMS)
def test_a_group_in_common_makes_no_key_alike(agent: str, name: str) -> None:
    assert unknown_key(f"agent.{name}", agent) == "no such key; --cfg job prints all keys"


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_of_other_trainers_are_told_with_their_value(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CleanRL's `--cuda`, `--no-cuda`, `--cuda False` and so on: what to type is accepted."""
    [of] = {(each.agent or "dqn") for each in OTHERS if each.name == name}
    agent, dashed = f"agent={of}", name.replace("_", "-")
    monkeypatch.setattr(sys, "argv", ["train.py"])  # as `hint` types
    yes, no = (each.replace("EVALUATE", command_of("evaluate")) for each in SWITCHES[name])
    for write in (yes, no):
        program = write.startswith(f"{command_of('evaluate')} RUN --video ")
        assert program or settings(agent, *write.split())
    for typed in ([f"--{dashed}"], [f"--{name}=True"], [f"--{dashed}", "true"], [f"{name}=1"]):
        assert hint(monkeypatch, capsys, agent, *typed) == yes
    for typed in ([f"--no-{dashed}"], [f"--{dashed}", "False"], [f"{name}=false"]):
        assert hint(monkeypatch, capsys, agent, *typed) == no


def test_a_film_is_told_as_a_program_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/steadyrl", "--capture-video"])
    line = "no such option; film a run: steadyrl evaluate RUN --video film.mp4"
    assert refusal(capsys) == f"error: --capture-video: {line}"


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("--deterministic", "deterministic=true"),
        ("--no-deterministic", "deterministic=false"),
        ("agent=ppo --norm-obs", "agent.normalize_obs=…"),
        ("--double agent=dqn", "agent.double=true"),
        ("--resume", "resume=last (the newest unfinished run in outputs/)"),
        ("--resume run_dir=x", "resume=last (the newest unfinished run in outputs/)"),
        ("--resume total_steps=9", "resume=last (the newest unfinished run in outputs/)"),
        ("--resume outputs/a", "resume=outputs/a"),
        ("--init-from", "init_from=RUN"),
        ("--seed 3", "seed=3"),
        ("--seed agent=dqn", "seed=…"),
        ("--env-id CartPole-v1", "env.id=CartPole-v1"),
        ("--env cartpole", "env=cartpole"),
        ("--run_dir=x", "run_dir=x"),
    ],
)
def test_options_are_told_as_overrides_with_their_value(
    typed: str, written: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hint(monkeypatch, capsys, *typed.split()) == written
