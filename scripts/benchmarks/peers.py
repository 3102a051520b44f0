"""Other trainers and replays, given the same work; each is there only where it is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SB3 = "Stable-Baselines3"
ALPHA, BETA = 0.6, 0.4  # of every prioritised replay
EPISODE = 200  # rows


def installed(module: str, name: str) -> bool:
    """Say whether a peer is there, and print how to get it where it is not."""
    there = find_spec(module) is not None
    if not there:
        print(f'{name} is not installed: pip install -e ".[peers]"')
    return there


class Data(NamedTuple):
    """What all contestants are fed."""

    obs: NDArray[np.float32]  # [rows, size]
    reward: NDArray[np.float32]  # [rows]
    done: NDArray[np.bool_]  # [rows]
    error: NDArray[np.float32]  # [rows] what priorities are made of


def make_data(rows: int, size: int) -> Data:
    """Return random rows with an end every EPISODE rows."""
    random = np.random.default_rng(0)
    done = np.zeros(rows, np.bool_)
    done[EPISODE - 1 :: EPISODE] = True
    return Data(
        random.random((rows, size), np.float32),
        random.random(rows, np.float32),
        done,
        random.exponential(size=rows).astype(np.float32),
    )


Cycle = Callable[[int], Callable[[], None]]  # batch size → one add + sample + update


def cpprb(data: Data) -> Cycle:
    """Return cycles of cpprb's prioritised buffer (1-step, its default)."""
    from cpprb import PrioritizedReplayBuffer

    size, rows = data.obs.shape[1], len(data.obs)
    plain: dict[str, Any] = {"rew": {}, "done": {}, "act": {"dtype": np.int64}}
    fields = {"obs": {"shape": size}, "next_obs": {"shape": size}, **plain}
    replay = PrioritizedReplayBuffer(rows, fields, alpha=ALPHA)
    replay.add(
        obs=data.obs,
        next_obs=data.obs,
        rew=data.reward,
        done=data.done,
        act=np.zeros(rows, np.int64),
    )
    replay.update_priorities(np.arange(rows), data.error)
    row = 0

    def cycle(batch_size: int) -> Callable[[], None]:
        error = data.error[:batch_size].copy()

        def once() -> None:
            nonlocal row
            row = (row + 1) % rows
            obs = data.obs[row]
            replay.add(obs=obs, next_obs=obs, rew=data.reward[row], done=data.done[row], act=0)
            batch = replay.sample(batch_size, beta=BETA)
            replay.update_priorities(batch["indexes"], error)

        return once

    return cycle


def tianshou(data: Data) -> Cycle:
    """Return cycles of Tianshou's prioritised buffer (1-step; its n-step is in the algorithm)."""
    from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

    rows = len(data.obs)
    replay = PrioritizedReplayBuffer(rows, alpha=ALPHA, beta=BETA)
    filled = ReplayBuffer.from_data(
        data.obs,
        np.zeros(rows, np.int64),
        data.reward,
        data.done,
        np.zeros(rows, np.bool_),
        data.done,
        data.obs,
    )
    replay.update(filled)
    replay.update_weight(np.arange(rows), data.error)
    row = 0

    def cycle(batch_size: int) -> Callable[[], None]:
        error = data.error[:batch_size].copy()

        def once() -> None:
            nonlocal row
            row = (row + 1) % rows
            obs, done = data.obs[row], bool(data.done[row])
            step: Any = Batch(
                obs=obs,
                act=0,
                rew=data.reward[row],
                terminated=done,
                truncated=False,
                obs_next=obs,
                info={},
            )
            replay.add(step)
            _, index = replay.sample(batch_size)
            replay.update_weight(index, error)

        return once

    return cycle


def sb3_replay_bytes(capacity: int, shape: tuple[int, ...], dtype: Any, optimised: bool) -> int:
    """Return the bytes of all arrays of its (uniform) replay."""
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import ReplayBuffer as Theirs

    replay = Theirs(
        capacity,
        Box(0, 1 if dtype == np.float32 else 255, shape, dtype),
        Discrete(6),
        device="cpu",
        optimize_memory_usage=optimised,
        handle_timeout_termination=not optimised,  # it has not both
    )
    return sum(part.nbytes for part in vars(replay).values() if isinstance(part, np.ndarray))


def sb3_dqn() -> Callable[[int], object] | None:
    """Return the same work in Stable-Baselines3, or None where it is not installed."""
    if not installed("stable_baselines3", SB3):
        return None
    from stable_baselines3 import DQN

    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=2.5e-4,
        buffer_size=100_000,
        learning_starts=1_000,
        batch_size=128,
        train_freq=1,
        gradient_steps=1,
        target_update_interval=500,
        exploration_fraction=0.05,
        policy_kwargs={"net_arch": [120, 84]},
        device="cpu",
        seed=0,
    )
    model.learn(1_500)
    return lambda steps: model.learn(steps, reset_num_timesteps=False)


def sb3_ppo(envs: int, rows: int, minibatches: int) -> Callable[[int], object] | None:
    """Return the same work in Stable-Baselines3, or None where it is not installed."""
    if not installed("stable_baselines3", SB3):
        return None
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=envs, seed=0),
        learning_rate=2.5e-4,
        n_steps=rows,
        batch_size=envs * rows // minibatches,
        n_epochs=4,
        policy_kwargs={"net_arch": [64, 64]},
        device="cpu",
        seed=0,
    )
    model.learn(2 * envs * rows)
    return lambda steps: model.learn(steps, reset_num_timesteps=False)


def race_sb3(told: Mapping[str, Any]) -> float:
    """Train and evaluate Stable-Baselines3 as `race.for_sb3` says; return its score."""
    import gymnasium
    import torch
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    with suppress(ImportError):
        import minatar.gym as games

        games.register_envs()
    name, kwargs, seed = told["env"], told["kwargs"], told["seed"]
    env = make_vec_env(name, n_envs=told["num_envs"], seed=seed, env_kwargs=kwargs)
    if told["normalize"]:
        env = VecNormalize(env, **told["normalize"])
    settings = {name: _falling(value) for name, value in told["model"].items()}
    algorithm = {"dqn": DQN, "ppo": PPO}[told["algorithm"]]
    policy = {"net_arch": told["hidden"]} if told["hidden"] else None
    model = algorithm("MlpPolicy", env, policy_kwargs=policy, device="cpu", seed=seed, **settings)
    model.learn(told["total_timesteps"])
    # Some policies never come to an end.
    longest = gymnasium.spec(name).max_episode_steps or told["longest"]
    ended = kwargs | {"max_episode_steps": longest}
    unseen = make_vec_env(name, n_envs=1, seed=seed + 10_000, env_kwargs=ended)
    if told["normalize"]:
        theirs = env.obs_rms if told["normalize"]["norm_obs"] else None
        unseen = VecNormalize(unseen, training=False, **told["normalize"] | {"norm_reward": False})
        unseen.obs_rms = theirs
    score, _ = evaluate_policy(model, unseen, n_eval_episodes=told["episodes"])
    return float(score)


def _falling(value: Any) -> Any:
    """Return a schedule of the share of the run that is left, where a number is to fall to 0."""
    return (lambda left: left * value[0]) if isinstance(value, list) else value


def race_rejax(told: Mapping[str, Any]) -> float:
    """Train and evaluate rejax's PPO as `race.for_rejax` says; return its score."""
    import jax
    import rejax

    algorithm = rejax.get_algo("ppo").create(**told["config"])
    _, (_, returns) = jax.jit(algorithm.train)(jax.random.PRNGKey(told["seed"]))
    return float(returns[-1].mean())


if __name__ == "__main__":  # a contestant of a race: nothing else is loaded
    contestant = {"sb3": race_sb3, "rejax": race_rejax}[sys.argv[1]]
    print(json.dumps(contestant(json.loads(sys.argv[2]))))
