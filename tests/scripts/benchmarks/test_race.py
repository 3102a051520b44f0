"""Settings of peer libraries in a race: the preset and overrides, translated."""

from dataclasses import replace
from types import SimpleNamespace

from scripts.benchmarks import race
from steadyrl.training.run.job import accept, compose_one


def settings_of(*overrides):
    return accept(compose_one(list(overrides)), overrides).settings


def test_overrides_are_translated_for_peers():
    overrides = ("total_steps=5000", "env.num_envs=4", "agent.rollout_steps=64", "agent.epochs=3")
    settings = settings_of("experiment=cartpole_ppo", *overrides, "agent.minibatches=2")
    theirs = race.for_sb3(settings)
    assert theirs["total_timesteps"] == 5_000 and theirs["num_envs"] == 4
    assert theirs["model"]["n_steps"] == 64 and theirs["model"]["n_epochs"] == 3
    rejax = race.for_rejax(settings, settings.agent)
    assert rejax["total_timesteps"] == 5_000 and rejax["num_envs"] == 4
    assert rejax["num_steps"] == 64 and rejax["num_epochs"] == 3
    assert rejax["num_minibatches"] * theirs["model"]["batch_size"] == 4 * 64


def test_learning_rates_annealed_to_0_are_given_as_a_list():
    annealed = settings_of("agent=ppo", "env=cartpole", "agent.anneal_learning_rate=linear")
    assert race.for_sb3(annealed)["model"]["learning_rate"] == [annealed.agent.learning_rate]
    constant = settings_of("agent=ppo", "env=cartpole", "agent.anneal_learning_rate=constant")
    assert race.for_sb3(constant)["model"]["learning_rate"] == constant.agent.learning_rate


def test_dqn_settings_are_translated_for_sb3():
    settings = settings_of("experiment=cartpole_dqn", "agent.n_step=3", "agent.train_every=8")
    theirs = race.for_sb3(settings)
    assert theirs["algorithm"] == "dqn" and theirs["normalize"] is None
    model, ours = theirs["model"], settings.agent
    assert model["n_steps"] == 3 and model["train_freq"] == 8
    assert model["buffer_size"] == ours.replay.capacity
    assert model["target_update_interval"] == ours.target_every
    assert model["learning_starts"] == ours.learning_starts


def test_algorithms_without_a_translation_race_alone(monkeypatch):
    monkeypatch.setattr(race, "installed", lambda module, name: True)
    known = settings_of("agent=ppo", "env=cartpole")
    assert [*race.contestants((), known)] == [race.OURS, race.SB3, race.REJAX]
    foreign = replace(known, agent=SimpleNamespace(name="foreign"))
    assert [*race.contestants((), foreign)] == [race.OURS]


def test_ratios_are_computed_per_seed():
    ours = [race.Finish(1.0, 500.0), race.Finish(4.0, 400.0), race.Finish(2.0, 300.0)]
    theirs = [race.Finish(3.0, 500.0), race.Finish(8.0, 450.0), race.Finish(8.0, 480.0)]
    assert race.line("p", "peer", theirs, ours) == "| p | peer | 8.0 | 3.00x | 500, 450, 480 |"
