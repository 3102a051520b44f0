"""Rows that compiled code makes many at a time are those of the plain loop, to the last bit."""

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
    "agent.replay.capacity=300",  # which is overwritten twice
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


def played(folder, overrides, rows):
    """Return the lines and the whole state of a run whose stretches have so many rows at most."""
    told, lines = job(folder, *overrides, quick=False), Lines()
    made = []
    with build(told) as (env, agent):
        inside = agent.collect_block

        def collect_block(decision, run, steps):
            env._max_timesteps = rows
            found = inside(decision, run, steps) if rows else None
            made.append(found is not None)
            return found

        agent.collect_block = collect_block
        env.reset()
        run = opened(told, agent, lines)
        for until in (431, told.settings.run.total_steps):
            train(run, env, agent, until)
        run.complete()
        return lines, [each.state_dict() for each in (agent, env)], run.summary, sum(made)


def same(one, other):
    """Hold two states to each other, to the last bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other)


def held(folder, overrides, lengths):
    """Hold runs with stretches of so many rows at most to the plain loop."""
    lines, states, summary, _ = played(folder / "plain", overrides, 0)
    assert summary.updates > 5 and len(lines) >= 6
    for rows in lengths:
        found = played(folder / str(rows), overrides, rows)
        assert found[0] == lines
        assert same(found[1], states)
        assert found[2].weights_sha256 == summary.weights_sha256
        assert found[3] > 0


@pytest.mark.parametrize("name", ["cartpole", "pendulum", "boards"])
def test_a_rollout_in_one_call_is_that_of_the_plain_loop(tmp_path, name):
    held(tmp_path, (*PPO, *ENVS[name]), [7])


@pytest.mark.parametrize("name", ["uniform", "prioritised", "stacked boards"])
def test_a_replay_filled_in_one_call_is_that_of_the_plain_loop(tmp_path, name):
    held(tmp_path, (*DQN, *REPLAYS[name]), [7])


@pytest.mark.slow
@pytest.mark.parametrize(
    "told",
    [*((*PPO, *ENVS[name]) for name in ENVS), *((*DQN, *REPLAYS[name]) for name in REPLAYS)],
    ids=[*(f"ppo-{name}" for name in ENVS), *(f"dqn-{name}" for name in REPLAYS)],
)
def test_whatever_is_acted_on_and_however_long_a_call_is_nothing_else_comes_of_it(
    tmp_path, told, monkeypatch
):
    held(tmp_path, told, [1, 5, 1000])
