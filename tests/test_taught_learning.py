"""What a teacher saves: steps to the gate of LunarLander; minutes, so marked slow."""

from statistics import mean

import pytest
from command import run

PRESET = ("experiment=lunarlander_ppo", "device=cpu")


@pytest.mark.slow
def test_students_reach_the_gate_in_under_a_fifth_of_the_steps(tmp_path):
    teacher, told, _ = run(tmp_path, *PRESET, "eval.every=0", quick=False)
    assert told["steps"] >= 1_000_000
    asked = (*PRESET, f"agent.teacher={teacher}", "total_steps=150000")
    scores = [
        run(tmp_path / seed, *asked, f"seed={seed}", quick=False)[1]["eval_return_mean"]
        for seed in ("10", "11", "12")
        if (tmp_path / seed).mkdir() is None
    ]
    assert mean(scores) >= 240, scores
