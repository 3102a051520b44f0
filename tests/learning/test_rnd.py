"""RND finds the only reward of MountainCarContinuous; takes minutes, so marked slow."""

from statistics import mean

import pytest
from command import run

OPTIONS = (
    "agent=ppo", "env=mountaincar_continuous", "env.num_envs=8", "agent.rollout_steps=128",
    "agent.epochs=4", "total_steps=300_000", "eval.every=100_000", "eval.episodes=20",
    "device=cpu", "agent.learning_rate=3e-4", "agent.entropy_coef=0", "agent.target_kl=null",
    "agent.minibatches=8", "agent.value_coef=0.5",
    "agent.normalize_obs=false", "agent.normalize_reward=false",  # else RND is not needed
)  # fmt: skip


@pytest.mark.slow
def test_rnd_climbs_the_hill_and_plain_ppo_never_does(tmp_path):
    scores = {0: [], 1: []}
    for coef, found in scores.items():
        for seed in range(3):
            folder = tmp_path / f"{coef}-{seed}"
            folder.mkdir()
            overrides = (*OPTIONS, f"agent.rnd.coef={coef}", f"seed={seed}")
            found.append(run(folder, *overrides, quick=False)[1]["eval_return_mean"])
    assert mean(scores[1]) >= 60 and min(scores[1]) >= 40, scores
    assert max(scores[0]) <= 1, scores
