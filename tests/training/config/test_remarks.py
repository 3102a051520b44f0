"""Settings that do less, or something else, than expected get one line; others none."""

from operator import attrgetter
from pathlib import Path

import pytest
import warm
from opened import job

from steadyrl.agents.registry import ALGORITHMS, settings_type
from steadyrl.envs.types import DiscreteActions, EnvSpec
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
SPEC = EnvSpec("Some-v0", 1, (4,), "float32", 1, DiscreteActions(2))
PPO = ("agent=ppo", "env.num_envs=1", "agent.rollout_steps=128")
WHOLE = ("agent.recurrent.cell=gru", "agent.minibatches=1")
LINEAR, WARMUP = "agent.anneal_entropy_coef=linear", "agent.entropy_coef_warmup=0.5"
BOX = ("env=pendulum",)
NOT_CONTINUOUS = "has no effect: CartPole-v1 has no continuous actions"
NO_BONUS = "has no effect: the entropy coefficient is 0 from start to end"
RND_LATE = "has no effect: advantages of RND begin with the second rollout"
OF_ONE = "leaves minibatches of one sample, whose normalised advantage is 0"
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
        (
            ["agent.target_every=30_000"],
            "agent.target_every=30_000 has no effect: the run ends at step 20,000, before the "
            "target network is updated",
        ),
        ([*PPO, "agent.log_std_init=-1"], f"agent.log_std_init=-1 {NOT_CONTINUOUS}"),
        ([*PPO, "agent.scale_actions=false"], f"agent.scale_actions=false {NOT_CONTINUOUS}"),
        ([*PPO, *BOX, LINEAR], f"{LINEAR} {NO_BONUS}"),
        ([*PPO, *BOX, WARMUP], f"{WARMUP} {NO_BONUS}"),
        (
            [*PPO, *WHOLE, "agent.recurrent.sequence_length=200"],
            "agent.recurrent.sequence_length=200 has no effect: sequences end with the rollout, "
            "after agent.rollout_steps=128",
        ),
        ([*PPO, "agent.rnd.coef=1", "agent.rollout_steps=20_000"], f"agent.rnd.coef=1 {RND_LATE}"),
        ([*PPO, "agent.batch_size=1"], f"agent.batch_size=1 {OF_ONE}"),
        ([*PPO, "agent.minibatches=65"], f"agent.minibatches=65 {OF_ONE}"),
        ([*PPO, "agent.rollout_steps=1", "agent.minibatches=1"], f"agent.minibatches=1 {OF_ONE}"),
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
        ["agent.target_every=20_000", "agent.target_tau=0.5"],
        [*PPO, "agent.minibatches=64"],
        [*PPO, "agent.batch_size=3"],  # leaves one of two
        [*PPO, *BOX, "agent.log_std_init=-1", "agent.scale_actions=false"],
        [*PPO, *BOX, "agent.entropy_coef=0.01", "agent.anneal_entropy_coef=linear"],
        [*PPO, "agent.anneal_entropy_coef=linear"],
        [*PPO, "agent.rnd.coef=1", "agent.rnd.fraction=0.1"],
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
    found = [*remarks(typed, settings, SPEC, lambda: "ale")]
    both = zip(found, expected, strict=True)
    assert all(line.startswith(f"experiment={said}") for line, said in both)


def test_every_preset_names_its_environment():
    """Otherwise none would differ from that of the command line."""
    from steadyrl.training.config.remarks import PART

    presets = [*(CONFIGS / "experiment").glob("*.yaml")]
    assert len(presets) > 20
    for preset in presets:
        assert [part for part, _ in PART.findall(preset.read_text())].count("env") == 1, preset


def test_keys_of_initial_weights_have_no_effect_with_init_from(tmp_path, capsys):
    first = warm.run(tmp_path, *PPO, *BOX, "total_steps=128", "eval.every=0", quick=False)[0]
    second = f"run_dir={tmp_path / 'second'}"
    given = ["agent.log_std_init=-2", "agent.network.init=uniform"]
    found = lines(tmp_path, capsys, *PPO, *BOX, *given, f"init_from={first}", second)
    assert sorted(found) == [f"{key} has no effect: init_from gives the weights" for key in given]


def test_rnd_ends_before_the_second_rollout(tmp_path, capsys):
    found = lines(tmp_path, capsys, *PPO, "agent.rnd.coef=1", "agent.rnd.fraction=0.006")
    names = ("coef=1", "fraction=0.006")
    assert found == [f"agent.rnd.{name} {RND_LATE}, after 128 steps" for name in names]


@pytest.mark.parametrize("agent", EXCLUDING)
def test_keys_without_effect_are_keys_of_the_agent(agent):
    settings = load_settings(completed({"agent": {"name": agent}})).agent
    for name in {**settings.unused, **settings.unused_in(SPEC, 1)}:
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
        list(remarks(given, settings, SPEC, lambda: "sync"))
        assert also_unknown(": no such key", [given[0], "agent.gama=1"])
