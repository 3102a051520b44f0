"""Recurrent PPO solves partially observed tasks; takes minutes, so marked slow."""

import pytest
from command import run

# Hidden: velocities, or a bit that was shown 40 steps before it is needed.
POSITIONS = {"cartpole": "[0,2]", "pendulum": "[0,1]"}
CARTPOLE = (
    "experiment=cartpole_ppo",
    "total_steps=200000",
    "agent.rollout_steps=128",
    "agent.epochs=10",
    "agent.recurrent.sequence_length=32",
    "agent.gamma=0.99",
    "agent.gae_lambda=0.95",
    "agent.normalize_reward=true",
)
PENDULUM = ("experiment=pendulum_ppo", "total_steps=200000", "agent.batch_size=256")
BIT = (
    "agent=ppo",
    "env.id=bit_env:FirstBit-v0",
    "env.num_envs=16",
    "total_steps=100000",
    "eval.episodes=100",
    "agent.rollout_steps=128",
    "agent.batch_size=512",
    "agent.learning_rate=1e-3",
    "agent.recurrent.sequence_length=64",
    "agent.entropy_coef=0",
    "agent.normalize_obs=false",
    "agent.normalize_reward=false",
    "agent.target_kl=null",
    "agent.value_coef=0.5",
)


def score(folder, memory, *overrides):
    folder.mkdir()
    every = (*overrides, f"agent.recurrent.cell={memory}", "device=cpu")
    return run(folder, *every, quick=False)[1]["eval_return_mean"]


def only(env):
    return rf"env.wrappers=[{{own_wrappers\:Only: {{indices: {POSITIONS[env]}}}}}]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "kind", "reached", "missed"),
    [
        ((*CARTPOLE, only("cartpole")), "gru", 450, 100),
        ((*PENDULUM, only("pendulum")), "gru", -250, -800),
        (BIT, "gru", 0.99, 0.65),
    ],
    ids=["cartpole", "pendulum", "bit"],
)
def test_recurrent_ppo_solves_partially_observed_tasks(tmp_path, overrides, kind, reached, missed):
    assert score(tmp_path / "one", kind, *overrides) >= reached
    assert score(tmp_path / "other", "none", *overrides) <= missed
