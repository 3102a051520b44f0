"""Frame stacks rebuilt by the replay equal the observations bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy_environments import settings

from steadyrl.buffers.replay.build import build_replay
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.envs.factory import build_env


def compare(env, steps, action_count):
    """Play, store and sample; every sampled stack must equal the observation of its timestep."""
    spec = env.spec
    rng = np.random.default_rng(0)
    replay = build_replay(
        ReplaySettings(
            capacity=2 * steps, prioritized=False, alpha=0.6, beta_start=0.4,
            beta_end=1.0, anneal_beta="linear", beta_warmup=0.0,
            normalize_weights="replay", device="cpu",
        ),
        frame_shape=spec.frame_shape,
        dtype=spec.dtype,
        frame_stack=spec.frame_stack,
        num_envs=spec.num_envs,
        n_step=1,
        gamma=0.99,
        device=torch.device("cpu"),
        seed=0,
    )  # fmt: skip
    obs = env.reset()
    replay.start(obs)
    seen = [[hash(stack.tobytes()) for stack in obs]]
    ends = []
    for _ in range(steps // spec.num_envs):
        action = rng.integers(0, action_count, spec.num_envs)
        step = env.step(action)
        replay.add(action, *step[1:5], step.obs)
        seen.append([hash(stack.tobytes()) for stack in step.obs])
        ends.append((step.terminated.any(), step.truncated.any(), (~step.valid).any()))
    for _ in range(steps // 100):
        batch = replay.sample(100)
        timesteps, envs = np.divmod(batch.index.numpy(), spec.num_envs)
        for obs_, shift in ((batch.obs, 0), (batch.next_obs, 1)):
            rebuilt = [hash(np.ascontiguousarray(stack).tobytes()) for stack in obs_.numpy()]
            assert rebuilt == [seen[r + shift][e] for r, e in zip(timesteps, envs, strict=True)]
    return np.array(ends)


@pytest.mark.parametrize(
    ("env_id", "steps"),
    [
        ("ALE/Breakout-v5", 1200),
        pytest.param("ALE/Breakout-v5", 20_000, marks=pytest.mark.slow),
        pytest.param("ALE/Pong-v5", 20_000, marks=pytest.mark.slow),
    ],
)
def test_replayed_atari_stacks_equal_the_observations(env_id, steps):
    pytest.importorskip("ale_py")
    kwargs = {"episodic_life": True, "max_num_frames_per_episode": 700, "num_threads": 2}
    config = settings(env_id, backend="ale", num_envs=4, frame_stack=4, kwargs=kwargs)
    with build_env(config, seed=0) as env:
        ends = compare(env, steps, env.spec.action.n)
    terminated, truncated, invalid = ends.any(axis=0)
    assert truncated
    assert invalid
    assert terminated or "Pong" in env_id


@pytest.mark.parametrize("at", [1, 3])
def test_replayed_stacks_of_crashing_environments_equal_the_observations(tmp_path, at):
    kwargs = {"fault": "step:raise", "at": at, "fuse": str(tmp_path / "fuse"), "times": 40}
    config = settings(
        "toy_environments:ToyFaulty-v0", num_envs=2, frame_stack=3, kwargs=kwargs, max_restarts=99
    )
    with build_env(config, seed=0) as env:
        compare(env, 400, 2)
