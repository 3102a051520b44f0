"""What a teacher saves: steps to the gate of LunarLander; minutes, so marked slow."""

from statistics import mean

import pytest
from command import run

PRESET = ("experiment=lunarlander_ppo", "device=cpu")
GATE = 240


@pytest.mark.slow
def test_students_reach_the_gate_in_under_a_fifth_of_the_steps(tmp_path):
    # Who is to teach the way to the gate has been there: not every seed has, on every processor.
    for seed in range(4):
        (tmp_path / f"teacher-{seed}").mkdir()
        own = (*PRESET, f"seed={seed}", "eval.every=1_000_000")
        teacher, told, _ = run(tmp_path / f"teacher-{seed}", *own, quick=False)
        if told["eval_return_mean"] >= GATE:
            break
    assert told["steps"] >= 1_000_000 and told["eval_return_mean"] >= GATE
    asked = (*PRESET, f"agent.teacher.policy={teacher}", "total_steps=150000")
    scores = [
        run(tmp_path / seed, *asked, f"seed={seed}", quick=False)[1]["eval_return_mean"]
        for seed in ("10", "11", "12")
        if (tmp_path / seed).mkdir() is None
    ]
    assert mean(scores) >= GATE, scores
