"""Replay samples equal what happened, on every backend, with stacks, n steps and a full ring."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from counter_envs import LONGEST
from toy_environments import settings

from steadyrl.buffers.replay.build import build_replay
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.envs.factory import build_env

GAMMA = 0.9
ENVS = 3
# backend → (environment, kwargs, required module, timesteps, capacity)
CASES = {
    "sync": ("counter_envs:Stamped-v0", {}, "gymnasium", 400, 150),
    "async": ("counter_envs:Stamped-v0", {}, "gymnasium", 400, 150),
    "batch": ("counter_envs:Stamped-v0", {}, "gymnasium", 400, 150),
    "kernel": ("own_kernels:Counted-v0", {}, "gymnasium", 400, 150),
    "sync, crashes": ("counter_envs:Stamped-v0", {"crashes": 0.05}, "gymnasium", 400, 150),
    "async, crashes": ("counter_envs:Stamped-v0", {"crashes": 0.02}, "gymnasium", 150, 90),
    "ale": ("ALE/Pong-v5", {"max_num_frames_per_episode": 200}, "ale_py", 130, 150),
    "envpool": ("CartPole-v1", {"max_episode_steps": 12}, "envpool", 400, 150),
}


def expected(timesteps, t, env, n):
    """Return action, n-step return, discount and next observation at timestep t, by definition."""
    total, discount, end = 0.0, 1.0, t
    for step in timesteps[t : t + n]:
        if not step["valid"][env]:  # the episode was cut: bootstrap from here
            break
        total += discount * step["reward"][env]
        discount *= GAMMA
        end += 1
        if step["terminated"][env]:
            discount = 0.0
        if step["terminated"][env] or step["truncated"][env]:
            break
    return timesteps[t]["action"][env], total, discount, timesteps[end - 1]["next_obs"][env]


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize(("n", "stack"), [(1, 1), (3, 1), (1, 3), (4, 2), (LONGEST + 2, 4)])
@pytest.mark.parametrize("case", CASES)
def test_replay_samples_equal_the_transitions_that_happened(case, n, stack, prioritized):
    env_id, kwargs, module, steps, capacity = CASES[case]
    if find_spec(module) is None:
        pytest.skip(f"needs {module}")
    if module != "gymnasium" and (n, stack) not in ((1, 1), (4, 2)):
        pytest.skip("covered by the others")
    config = settings(
        env_id, backend=case.partition(",")[0], num_envs=ENVS, frame_stack=stack, kwargs=kwargs,
        max_restarts=10_000,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    timesteps, crashes = [], 0
    with build_env(config, seed=2) as env:
        spec = env.spec
        replay = build_replay(
            ReplaySettings(
                capacity=capacity, prioritized=prioritized, alpha=0.6, beta_start=0.4,
                beta_end=1.0, anneal_beta="linear", beta_warmup=0.0,
            normalize_weights="replay", device="cpu",
            ),
            frame_shape=spec.frame_shape, dtype=spec.dtype, frame_stack=stack, num_envs=ENVS,
            n_step=n, gamma=GAMMA, device=torch.device("cpu"), seed=0,
        )  # fmt: skip
        obs = env.reset().copy()
        replay.start(obs)
        done = np.zeros(ENVS, bool)
        for _ in range(steps):
            action = rng.integers(0, spec.action.n, ENVS)
            step = env.step(action)
            replay.add(action, *step[1:5], step.obs)
            names = ("next_obs", "reward", "terminated", "truncated", "valid")
            timestep = {name: a.copy() for name, a in zip(names, step[:5], strict=True)}
            timesteps.append({**timestep, "obs": obs, "action": action})
            crashes += int((~done & ~step.valid).sum())
            obs, done = timestep["next_obs"], timestep["terminated"] | timestep["truncated"]
    assert (crashes > 0) == ("crashes" in case)
    times = find_timesteps(timesteps)
    checked = 0
    for _ in range(20):
        batch = replay.sample(32)
        for i, index in enumerate(batch.index.tolist()):
            t = times.get((index % ENVS, batch.obs[i].numpy().tobytes()))
            if t is None:  # this observation occurred twice
                continue
            action, total, discount, next_obs = expected(timesteps, t, index % ENVS, n)
            assert timesteps[t]["valid"][index % ENVS]
            assert steps - t <= capacity // ENVS + n + 1
            assert batch.action[i] == action
            assert batch.reward[i].item() == pytest.approx(total, abs=1e-5)
            assert batch.discount[i].item() == pytest.approx(discount, abs=1e-6)
            if discount > 0:
                np.testing.assert_array_equal(batch.next_obs[i].numpy(), next_obs)
            checked += 1
    assert checked > 100


def find_timesteps(timesteps):
    """Return the timestep of each observation of each environment, None if it occurred twice."""
    times = {}
    for t, timestep in enumerate(timesteps):
        for env in range(ENVS):
            key = (env, timestep["obs"][env].tobytes())
            # An episode's last observation occurs again in the reset step, which is invalid.
            if timestep["valid"][env]:
                times[key] = None if key in times else t
    return times
