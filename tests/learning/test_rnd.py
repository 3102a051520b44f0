"""What curiosity finds: the one reward of MountainCarContinuous; minutes, so marked slow."""

from statistics import mean

import pytest
from command import run

ASKED = (
    "agent=ppo", "env=mountaincar_continuous", "env.num_envs=8", "agent.rollout_steps=128",
    "agent.epochs=4", "total_steps=300_000", "eval.every=100_000", "eval.episodes=20",
    "device=cpu", "agent.learning_rate=3e-4", "agent.entropy_coef=0", "agent.target_kl=null",
    "agent.normalize_obs=false", "agent.normalize_reward=false",  # else the hill is found without
)  # fmt: skip


@pytest.mark.slow
def test_the_hill_is_climbed_with_curiosity_and_never_without(tmp_path):
    scores = {0: [], 1: []}
    for coef, found in scores.items():
        for seed in range(3):
            folder = tmp_path / f"{coef}-{seed}"
            folder.mkdir()
            asked = (*ASKED, f"agent.rnd.coef={coef}", f"seed={seed}")
            found.append(run(folder, *asked, quick=False)[1]["eval_return_mean"])
    assert mean(scores[1]) >= 60 and min(scores[1]) >= 40, scores
    assert max(scores[0]) <= 1, scores
