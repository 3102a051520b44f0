"""What the replay gives is what happened: over every backend, with stacks, n steps, a full ring."""

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
# backend → (environment, its keywords, module it needs, rows, capacity)
CASES = {
    "sync": ("counter_envs:Stamped-v0", {}, "gymnasium", 400, 150),
    "async": ("counter_envs:Stamped-v0", {}, "gymnasium", 400, 150),
    "native": ("counter_envs:Stamped-v0", {}, "gymnasium", 400, 150),
    "kernel": ("own_kernels:Counted-v0", {}, "gymnasium", 400, 150),
    "sync, breaks": ("counter_envs:Stamped-v0", {"crashes": 0.05}, "gymnasium", 400, 150),
    "async, breaks": ("counter_envs:Stamped-v0", {"crashes": 0.02}, "gymnasium", 150, 90),
    "ale": ("ALE/Pong-v5", {"max_num_frames_per_episode": 200}, "ale_py", 130, 150),
    "envpool": ("CartPole-v1", {"max_episode_steps": 12}, "envpool", 400, 150),
}


def expected(rows, t, env, n):
    """Return action, n-step return, discount and successor of row t by the definition."""
    total, discount, end = 0.0, 1.0, t
    for step in rows[t : t + n]:
        if not step["valid"][env]:  # it was cut: what it had come to stands
            break
        total += discount * step["reward"][env]
        discount *= GAMMA
        end += 1
        if step["terminated"][env]:
            discount = 0.0
        if step["terminated"][env] or step["truncated"][env]:
            break
    return rows[t]["action"][env], total, discount, rows[end - 1]["next_obs"][env]


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize(("n", "stack"), [(1, 1), (3, 1), (1, 3), (4, 2), (LONGEST + 2, 4)])
@pytest.mark.parametrize("case", CASES)
def test_samples_are_what_happened(case, n, stack, prioritized):
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
    rows, breaks = [], 0
    with build_env(config, seed=2) as env:
        spec = env.spec
        replay = build_replay(
            ReplaySettings(
                capacity=capacity, prioritized=prioritized, alpha=0.6, beta_start=0.4,
                beta_end=1.0, anneal_beta="linear", beta_warmup=0.0, device="cpu",
            ),
            frame_shape=spec.frame_shape, dtype=spec.dtype, frame_stack=stack, num_envs=ENVS,
            n_step=n, gamma=GAMMA, device=torch.device("cpu"), seed=0,
        )  # fmt: skip
        obs = env.reset().copy()
        replay.start(obs)
        over = np.zeros(ENVS, bool)
        for _ in range(steps):
            action = rng.integers(0, spec.action.n, ENVS)
            step = env.step(action)
            replay.add(action, *step[1:5], step.obs)
            names = ("next_obs", "reward", "terminated", "truncated", "valid")
            row = {name: a.copy() for name, a in zip(names, step[:5], strict=True)}
            rows.append({**row, "obs": obs, "action": action})
            breaks += int((~over & ~step.valid).sum())
            obs, over = row["next_obs"], row["terminated"] | row["truncated"]
    assert (breaks > 0) == ("breaks" in case)
    places = find_places(rows)
    checked = 0
    for _ in range(20):
        batch = replay.sample(32)
        for i, index in enumerate(batch.index.tolist()):
            place = places.get((index % ENVS, batch.obs[i].numpy().tobytes()))
            if place is None:  # such a picture was seen twice
                continue
            action, total, discount, successor = expected(rows, place, index % ENVS, n)
            assert rows[place]["valid"][index % ENVS]
            assert steps - place <= capacity // ENVS + n + 1
            assert batch.action[i] == action
            assert batch.reward[i].item() == pytest.approx(total, abs=1e-5)
            assert batch.discount[i].item() == pytest.approx(discount, abs=1e-6)
            if discount > 0:
                np.testing.assert_array_equal(batch.next_obs[i].numpy(), successor)
            checked += 1
    assert checked > 100


def find_places(rows):
    """Return the row in which each environment saw each observation, if it did so once."""
    places = {}
    for t, row in enumerate(rows):
        for env in range(ENVS):
            key = (env, row["obs"][env].tobytes())
            # An episode's end and what is ignored after it look alike: the valid one counts.
            if row["valid"][env]:
                places[key] = None if key in places else t
    return places
