"""Action masks: 3 of 100 doors are open; masked agents learn many times faster.

`Doors` fails when a closed door is tried, so a finished run has tried none.
"""

import json

import pytest
from command import run

STEPS = 100_000
DOORS = (
    "env.id=masked_envs:Doors-v0", "env.num_envs=8", "env.max_restarts=0", "device=cpu",
    "agent.compile=false", f"total_steps={STEPS}", "eval.every=500", "eval.episodes=1",
    "log.every=10000", "seed=0",
)  # fmt: skip
DQN = (
    "agent=dqn", "agent.learning_rate=5e-4", "agent.train_every=64", "agent.updates_per_train=8",
    "agent.target_every=256", "agent.replay.prioritized=false", "agent.epsilon_fraction=0.16",
    "agent.epsilon_end=0.04",
)  # fmt: skip

PPO = (
    "agent=ppo", "agent.learning_rate=3e-4", "agent.entropy_coef=0", "agent.normalize_obs=false",
    "agent.normalize_reward=false", "agent.target_kl=null", "agent.rollout_steps=512",
    "agent.minibatches=8", "agent.value_coef=0.5",
)  # fmt: skip


def first_step_at(folder, score, *overrides):
    """Train; return the step at which the greedy policy first reached a score, or infinity."""
    folder.mkdir()
    directory, summary, _ = run(folder, *DOORS, *overrides, quick=False)
    assert summary["status"] == "finished" and summary["steps"] >= STEPS
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    reached = (line["step"] for line in lines if line.get("eval/return_mean", -99) >= score)
    return next(reached, float("inf"))


@pytest.mark.slow
@pytest.mark.parametrize("agent", [DQN, PPO], ids=["dqn", "ppo"])
def test_masked_agents_learn_five_times_faster(tmp_path, agent):
    masked = first_step_at(tmp_path / "masked", 10, *agent, "env.action_masks=true")
    punished = ("env.action_masks=false", "env.kwargs={punish: true}")
    unmasked = first_step_at(tmp_path / "punished", 10, *agent, *punished)
    print(f"all rooms after {masked:,} steps with masks, {unmasked:,} without")
    assert 5 * masked <= min(unmasked, STEPS)
