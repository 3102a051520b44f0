"""Distillation saves steps on LunarLander; takes minutes, so marked slow."""

from statistics import mean

import pytest
from command import run

PRESET = ("experiment=lunarlander_ppo", "device=cpu")
GATE = 240


@pytest.mark.slow
def test_students_reach_the_gate_in_under_a_fifth_of_the_steps(tmp_path):
    # A teacher that reached the gate: not every seed does, on every processor.
    for seed in range(4):
        (tmp_path / f"teacher-{seed}").mkdir()
        overrides_ = (*PRESET, f"seed={seed}", "eval.every=1_000_000")
        teacher, summary, _ = run(tmp_path / f"teacher-{seed}", *overrides_, quick=False)
        if summary["eval_return_mean"] >= GATE:
            break
    assert summary["steps"] >= 1_000_000 and summary["eval_return_mean"] >= GATE
    overrides = (*PRESET, f"agent.teacher.policy={teacher}", "total_steps=150000")
    scores = [
        run(tmp_path / seed, *overrides, f"seed={seed}", quick=False)[1]["eval_return_mean"]
        for seed in ("10", "11", "12")
        if (tmp_path / seed).mkdir() is None
    ]
    assert mean(scores) >= GATE, scores
