"""Settings that do less, or something else, than expected get one line; others none."""

from operator import attrgetter
from pathlib import Path

import pytest
from opened import job

from steadyrl.agents.registry import ALGORITHMS, settings_type
from steadyrl.training.cli.checks.requirements import requirements
from steadyrl.training.config.hints.chosen_agent import default_agent
from steadyrl.training.config.hints.keys import also_unknown, unknown_key
from steadyrl.training.config.remarks import remarks
from steadyrl.training.config.settings import CONFIGS, completed, load_settings
from steadyrl.training.run.job import accept, compose_one
from steadyrl.training.setup import open_run

EXCLUDING = [name for name in ALGORITHMS if hasattr(settings_type(name), "unused")]
SYNC = "env.step_timeout=2 is not enforced: on env.backend=sync a step cannot be ended"
HUMAN = "env.kwargs.render_mode=human draws every training step"
MINIBATCHES = "agent.minibatches=4 has no effect: agent.batch_size=64 sets the size of minibatches"
LOSS = "agent.loss=huber has no effect: agent.distribution.kind=quantile"
POLICY = "agent.teacher.policy=pole_teacher:Anywhere"
TEMPERATURE = "agent.teacher.temperature=3"
V_MAX = "agent.distribution.v_max=5 has no effect: agent.distribution.kind=quantile"
ALPHA = "agent.replay.alpha=0.7 has no effect: agent.replay.prioritized=false"
RND = "agent.rnd.coef=1 has no effect: agent.rnd.fraction=0"
EPSILON = "agent.epsilon_fraction=0.5 has no effect: agent.anneal_epsilon=constant"
SUPPORT = "agent.distribution.kind=c51 represents discounted returns from -10 to 10: set agent.dist"
TUNED = "experiment=cartpole_dqn was tuned for {}: its hyper-parameters are used with {},"


def lines(folder, capsys, *overrides):
    """Return the warnings that a run prints when it is opened."""
    small = ("device=cpu", "eval.every=0", "agent.compile=false", "total_steps=20000")
    with open_run(job(folder, *overrides, *small, quick=False)):
        pass
    printed = capsys.readouterr().out.splitlines()
    assert any("steps," in line for line in printed)
    return [line[9:] for line in printed if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["env.backend=sync", "env.step_timeout=2"], SYNC),
        (["experiment=cartpole_dqn", "env=acrobot"], TUNED.format("env=cartpole", "env=acrobot")),
        (
            ["experiment=cartpole_dqn", "env.id=Acrobot-v1"],
            TUNED.format("env.id=CartPole-v1", "env.id=Acrobot-v1"),
        ),
        (["env.id=drawn_envs:Drawn-v0", "++env.kwargs.render_mode=human"], HUMAN),
        (["agent=ppo", "agent.minibatches=4", "agent.batch_size=64"], MINIBATCHES),
        (["experiment=cartpole_ppo", "agent.minibatches=4"], MINIBATCHES.replace("64", "256")),
        (["agent.distribution.kind=quantile", "agent.distribution.v_max=5"], V_MAX),
        (["agent.replay.prioritized=false", "agent.replay.alpha=0.7"], ALPHA),
        (["agent.distribution.kind=c51"], SUPPORT),
        (["agent=ppo", "agent.rnd.coef=1", "agent.rnd.fraction=0"], RND),
        (["agent.distribution.kind=quantile", "agent.loss=huber"], LOSS),
        ([POLICY, "agent.teacher.coef=0"], f"{POLICY} has no effect: agent.teacher.coef=0 and"),
        (
            [POLICY, "agent.teacher.fraction=0", "agent.teacher.acts=0.2", TEMPERATURE],
            f"{TEMPERATURE} has no effect: agent.teacher.fraction=0",
        ),
        (
            ["agent.epsilon_end=1", "agent.epsilon_fraction=0.5", "agent.anneal_epsilon=constant"],
            EPSILON,
        ),
    ],
)
def test_one_line(overrides, expected, tmp_path, capsys):
    [line] = lines(tmp_path, capsys, *overrides)
    assert line.startswith(expected)


@pytest.mark.parametrize(
    "overrides",
    [
        ["env.backend=async", "env.step_timeout=2"],
        ["env.backend=sync"],
        ["experiment=cartpole_dqn"],
        ["experiment=cartpole_dqn", "env=cartpole"],
        ["experiment=cartpole_dqn", "env.id=CartPole-v1"],
        ["agent=ppo", "agent.minibatches=4"],
        ["agent=ppo", "agent.batch_size=64"],
        ["agent.distribution.kind=c51", "agent.distribution.v_max=100"],
        ["agent.distribution.kind=c51", "agent.clip_reward=true"],
        ["agent.replay.prioritized=true", "agent.replay.alpha=0.7"],
    ],
)
def test_no_line(overrides, tmp_path, capsys):
    assert lines(tmp_path, capsys, *overrides) == []


@pytest.mark.parametrize(
    ("preset", "game", "expected"),
    [
        ("breakout_ppo", "ALE/Pong-v5", ["breakout_ppo was tuned for env.id=ALE/Breakout-v5: its"]),
        ("breakout_ppo", "ALE/Breakout-v5", []),
        ("atari100k_der", "ALE/Boxing-v5", []),
        ("atari100k_drq", "ALE/Boxing-v5", []),
    ],
)
def test_a_preset_of_an_atari_game_or_of_any_game(preset, game, expected):
    typed = [f"experiment={preset}", f"env.id={game}"]
    settings = accept(compose_one(typed), typed).settings
    found = [*remarks(typed, settings, lambda: "ale")]
    both = zip(found, expected, strict=True)
    assert all(line.startswith(f"experiment={said}") for line, said in both)


def test_every_preset_names_its_environment():
    """Otherwise none would differ from that of the command line."""
    from steadyrl.training.config.remarks import PART

    presets = [*(CONFIGS / "experiment").glob("*.yaml")]
    assert len(presets) > 20
    for preset in presets:
        assert [part for part, _ in PART.findall(preset.read_text())].count("env") == 1, preset


@pytest.mark.parametrize("agent", EXCLUDING)
def test_keys_without_effect_are_keys_of_the_agent(agent):
    settings = load_settings(completed({"agent": {"name": agent}})).agent
    for name in settings.unused:
        attrgetter(name)(settings)


@pytest.mark.parametrize(("agent", "key"), [("dqn", "noisy.sigma"), ("ppo", "recurrent.size")])
def test_the_keys_of_what_is_off_have_no_effect(agent, key):
    settings = load_settings(completed({"agent": {"name": agent}})).agent
    assert key in settings.unused


def test_files_are_utf_8_in_any_locale(monkeypatch):
    read = Path.read_text

    def in_ascii(path, encoding="ascii", errors=None):  # as with LC_ALL=C and no coercion
        return read(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", in_ascii)
    assert default_agent() in ALGORITHMS
    assert "did you mean" in unknown_key("agent.gama", "ppo")
    assert "" in requirements()
    for preset in (CONFIGS / "experiment").glob("*.yaml"):
        settings = load_settings(completed({"agent": {"name": "ppo"}}))
        given = [f"experiment={preset.stem}", "env.id=Any-v0"]
        list(remarks(given, settings, lambda: "sync"))
        assert also_unknown(": no such key", [given[0], "agent.gama=1"])
