"""The commands that stand for other trainers' defaults set every value of theirs."""

import pytest
from documented import ROOT, commands_of

from steadyrl.training.run.job import accept, compose_one

COMMON_PPO = {
    "hidden": (64, 64), "network.activation": "tanh", "optimizer.eps": 1e-5, "gamma": 0.99,
    "gae_lambda": 0.95, "clip": 0.2, "anneal_clip": "constant", "anneal_entropy_coef": "constant",
    "max_grad_norm": 0.5, "target_kl": None, "normalizes_reward": False, "normalize_obs": False,
    "popart": False, "clip_reward": False,
}  # fmt: skip
# Signatures of Stable-Baselines3 2.9.2, and the arguments of CleanRL's ppo.py.
SB3_PPO = COMMON_PPO | {
    "rollout_steps": 2048, "batch_size": 64, "epochs": 10, "learning_rate": 3e-4,
    "anneal_learning_rate": "constant", "entropy_coef": 0, "value_coef": 0.5, "clip_value": False,
    "scale_actions": False, "log_std_init": 0,
}  # fmt: skip
CLEANRL_PPO = COMMON_PPO | {
    "rollout_steps": 128, "minibatches": 4, "batch_size": None, "epochs": 4,
    "learning_rate": 2.5e-4, "anneal_learning_rate": "linear", "entropy_coef": 0.01,
    "value_coef": 0.25, "clip_value": True,
}  # fmt: skip
SB3_DQN = {
    "hidden": (64, 64), "network.activation": "relu", "optimizer.eps": 1e-8, "gamma": 0.99,
    "learning_rate": 1e-4, "anneal_learning_rate": "constant", "replay.capacity": 1_000_000,
    "replay.prioritized": False, "double": False, "dueling": False, "n_step": 1, "batch_size": 32,
    "learning_starts": 100, "train_every": 4, "updates_per_train": 1, "target_every": 10_000,
    "epsilon_start": 1.0, "epsilon_end": 0.05, "epsilon_fraction": 0.1, "max_grad_norm": 10,
}  # fmt: skip


def value(settings, name):
    first, _, rest = name.partition(".")
    found = getattr(settings, first)
    return value(found, rest) if rest else found


@pytest.mark.parametrize(
    ("index", "num_envs", "expected"),
    [(0, 1, SB3_PPO), (1, 4, CLEANRL_PPO), (2, 1, SB3_DQN)],
    ids=["SB3's PPO", "CleanRL's PPO", "SB3's DQN"],
)
def test_the_commands_of_other_trainers_have_their_defaults(index, num_envs, expected):
    page = (ROOT / "docs" / "coming-from.md").read_text()
    shown = page[page.index("These commands are SB3's PPO") :]
    arguments = list(commands_of(shown))[index][2:]
    settings = accept(compose_one(arguments), arguments).settings
    assert settings.run.env.num_envs == num_envs
    assert {name: value(settings.agent, name) for name in expected} == expected
