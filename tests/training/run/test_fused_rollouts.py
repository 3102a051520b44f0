"""Fused rollouts equal the step-by-step loop bitwise."""

import numpy as np
import pytest
import torch
from logged_runs import Lines, opened, train
from opened import job

from steadyrl.training.setup import build

PPO = (
    "agent=ppo",
    "device=cpu",
    "total_steps=900",
    "log.every=130",
    "eval.every=400",
    "agent.rollout_steps=32",
    "agent.epochs=1",
    "agent.minibatches=2",
    "agent.hidden=[16,8]",
)
ENVS = {
    "cartpole": ("env=cartpole", "env.num_envs=3"),
    "one": ("env=cartpole", "env.num_envs=1", "agent.network.layer_norm=true"),
    "stack": (
        "env=cartpole",
        "env.num_envs=3",
        "env.frame_stack=3",
        "agent.network.activation=silu",
    ),
    "pendulum": ("env=pendulum", "env.num_envs=2", "agent.normalize_obs=true"),
    "scores": ("env=mountaincar_continuous", "env.num_envs=3", "agent.normalize_reward=true"),
    "unscaled": ("env=pendulum", "agent.scale_actions=false", "agent.clip_reward=true"),
    "own": ("env.id=own_kernels:Counted-v0", "env.num_envs=3", "agent.network.activation=elu"),
    "table": ("env=frozenlake", "env.num_envs=4", "agent.network.activation=relu"),
    "boards": ("env=minatar_breakout", "env.num_envs=5"),
    "apart": (
        "env=minatar_asterix",
        "env.num_envs=2",
        "env.frame_stack=2",
        "agent.shared_trunk=false",
        "agent.network.layer_norm=true",
    ),
    "flat": ("env=minatar_freeway", "env.num_envs=3", "agent.network.encoder=mlp"),
}


DQN = (
    "device=cpu",
    "total_steps=900",
    "log.every=130",
    "eval.every=400",
    "agent.hidden=[16,8]",
    "agent.learning_starts=100",
    "agent.train_every=24",
    "agent.updates_per_train=3",
    "agent.batch_size=16",
    "agent.replay.capacity=300",  # overwritten twice
)
REPLAYS = {
    "uniform": ("env=cartpole", "env.num_envs=3"),
    "prioritised": ("env=cartpole", "agent.replay.prioritized=true", "agent.train_every=1"),
    "stack": ("env=cartpole", "env.num_envs=2", "env.frame_stack=3", "agent.n_step=5"),
    "own": (
        "env.id=own_kernels:Counted-v0",
        "env.num_envs=4",
        "agent.replay.prioritized=true",
        "agent.clip_reward=true",
        "agent.anneal_epsilon=cosine",
        "agent.epsilon_warmup=0.1",
        "agent.epsilon_delay=0.1",
        "agent.network.layer_norm=true",
    ),
    "table": ("env=frozenlake", "agent.n_step=1", "agent.learning_starts=0", "agent.train_every=1"),
    "often empty": (
        "env=frozenlake",
        "agent.n_step=2",
        "agent.learning_starts=20",
        "agent.train_every=7",
        "agent.target_every=3",
        "agent.target_tau=0.5",
        "agent.batch_size=1",
        "agent.replay.capacity=1",
    ),
    "constant": ("env=acrobot", "agent.anneal_epsilon=constant", "agent.epsilon_end=1"),
    "boards": ("env=minatar_breakout", "env.num_envs=3", "agent.replay.prioritized=true"),
    "stacked boards": ("env=minatar_seaquest", "env.frame_stack=2", "agent.dueling=true"),
}


def played(folder, overrides, max_timesteps):
    """Return log, state and summary of a run with fused rollouts up to this length."""
    run_job, lines = job(folder, *overrides, quick=False), Lines()
    fused = []
    with build(run_job) as (env, agent):
        collect_block_ = agent.collect_block

        def collect_block(decision, run, steps):
            env._max_timesteps = max_timesteps
            found = collect_block_(decision, run, steps) if max_timesteps else None
            fused.append(found is not None)
            return found

        agent.collect_block = collect_block
        env.reset()
        run = opened(run_job, agent, lines)
        for until in (431, run_job.settings.run.total_steps):
            train(run, env, agent, until)
        run.complete()
        return lines, [each.state_dict() for each in (agent, env)], run.summary, sum(fused)


def same(one, other):
    """Return whether two states are bitwise equal."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other)


def compare_with_plain_loop(folder, overrides, lengths):
    """Compare runs with fused rollouts of these lengths with the step-by-step loop."""
    lines, states, summary, _ = played(folder / "plain", overrides, 0)
    assert summary.updates > 5 and len(lines) >= 6
    for max_timesteps in lengths:
        found = played(folder / str(max_timesteps), overrides, max_timesteps)
        assert found[0] == lines
        assert same(found[1], states)
        assert found[2].weights_sha256 == summary.weights_sha256
        assert found[3] > 0


@pytest.mark.parametrize("name", ["cartpole", "pendulum", "boards"])
def test_fused_rollouts_of_ppo_equal_the_plain_loop(tmp_path, name):
    compare_with_plain_loop(tmp_path, (*PPO, *ENVS[name]), [7])


@pytest.mark.parametrize("name", ["uniform", "prioritised", "stacked boards"])
def test_fused_rollouts_of_dqn_equal_the_plain_loop(tmp_path, name):
    compare_with_plain_loop(tmp_path, (*DQN, *REPLAYS[name]), [7])


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [*((*PPO, *ENVS[name]) for name in ENVS), *((*DQN, *REPLAYS[name]) for name in REPLAYS)],
    ids=[*(f"ppo-{name}" for name in ENVS), *(f"dqn-{name}" for name in REPLAYS)],
)
def test_fused_rollouts_of_any_length_equal_the_plain_loop(tmp_path, overrides, monkeypatch):
    compare_with_plain_loop(tmp_path, overrides, [1, 5, 1000])
