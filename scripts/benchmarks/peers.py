"""The same work in other libraries, each used only if it is installed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

SB3, REJAX = "Stable-Baselines3", "rejax"


def installed(module: str, name: str) -> bool:
    """Return whether a peer is installed; print how to install it if not."""
    there = find_spec(module) is not None
    if not there:
        print(f'{name} is not installed: pip install -e ".[peers]"')
    return there


def dqn_peers(capacity: int) -> dict[str, Callable[[int], object]]:
    """Return the installed peers as functions that train DQN on `agents.WORK`."""
    found: dict[str, Callable[[int], object]] = {}
    if installed("stable_baselines3", SB3):
        found[SB3] = _sb3_dqn(capacity)
    if installed("rejax", REJAX):
        found[REJAX] = _rejax_dqn(capacity)
    return found


def ppo_peers(envs: int, rows: int, minibatches: int) -> dict[str, Callable[[int], object]]:
    """Return the installed peers as functions that train PPO on `agents.PPO_WORK`."""
    found: dict[str, Callable[[int], object]] = {}
    if installed("stable_baselines3", SB3):
        found[SB3] = _sb3_ppo(envs, rows, minibatches)
    if installed("rejax", REJAX):
        found[REJAX] = _rejax_ppo(envs, rows, minibatches)
    return found


def _sb3_dqn(capacity: int) -> Callable[[int], object]:
    from stable_baselines3 import DQN

    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=2.5e-4,
        buffer_size=capacity,
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


def _sb3_ppo(envs: int, rows: int, minibatches: int) -> Callable[[int], object]:
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


def _rejax_dqn(capacity: int) -> Callable[[int], object]:
    import rejax
    from flax import linen
    from rejax.networks import DiscreteQNetwork, EpsilonGreedyPolicy

    algorithm = rejax.get_algo("dqn").create(
        env="CartPole-v1",
        num_envs=1,
        num_epochs=1,
        learning_rate=2.5e-4,
        buffer_size=capacity,
        fill_buffer=1_000,
        batch_size=128,
        target_update_freq=500,
        ddqn=False,
        max_grad_norm=10.0,
    )
    # Its settings have no layer sizes.
    network: Any = EpsilonGreedyPolicy(DiscreteQNetwork)
    agent = network(hidden_layer_sizes=(120, 84), action_dim=2, activation=linen.relu)
    train = _jitted(algorithm.replace(agent=agent))
    train(1_500)
    return train


def _rejax_ppo(envs: int, rows: int, minibatches: int) -> Callable[[int], object]:
    import rejax

    algorithm = rejax.get_algo("ppo").create(
        env="CartPole-v1",
        num_envs=envs,
        num_steps=rows,
        num_epochs=4,
        num_minibatches=minibatches,
        learning_rate=2.5e-4,
        ent_coef=0.0,
        max_grad_norm=0.5,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": [64, 64]},
    )
    train = _jitted(algorithm, envs * rows)
    train(2 * envs * rows)
    return train


def _jitted(algorithm: Any, steps_of_an_iteration: int = 1) -> Callable[[int], object]:
    """Return a function that trains in one jitted program, without evaluations."""
    import jax

    def go_on(state: Any, iterations: int) -> Any:
        return jax.lax.fori_loop(
            0, iterations, lambda _, now: algorithm.train_iteration(now), state
        )

    compiled = jax.jit(go_on)
    state = algorithm.init_state(jax.random.PRNGKey(0))

    def train(steps: int) -> None:
        nonlocal state
        state = jax.block_until_ready(compiled(state, steps // steps_of_an_iteration))

    return train


def race_sb3(arguments: Mapping[str, Any]) -> float:
    """Train and evaluate Stable-Baselines3 with `race.for_sb3`'s settings; return its score."""
    import torch
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize
    from torch import nn

    torch.set_num_threads(1)
    with suppress(ImportError):
        import minatar.gym as games

        games.register_envs()
    name, kwargs, seed = arguments["env"], arguments["kwargs"], arguments["seed"]
    # Any: keeps type checks the same if the peer is not installed.
    env: Any = make_vec_env(name, n_envs=arguments["num_envs"], seed=seed, env_kwargs=kwargs)
    if arguments["normalize"]:
        env = VecNormalize(env, **arguments["normalize"])
    settings = {name: _falling(value) for name, value in arguments["model"].items()}
    algorithm = {"dqn": DQN, "ppo": PPO}[arguments["algorithm"]]
    policy = dict(arguments["policy"])
    if "activation" in policy:
        layers = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
        policy["activation_fn"] = layers[policy.pop("activation")]
    if policy.get("log_std_init", 0.0) is None:  # our default
        size = math.prod(env.action_space.shape)
        policy["log_std_init"] = min(0.0, 0.5 * math.log(3 / size))
    if len(env.observation_space.shape) == 3 and arguments["encoder"] in ("auto", "minatar"):
        policy |= _with_filters(policy, shared=arguments["shared"])
    model = algorithm("MlpPolicy", env, policy_kwargs=policy, device="cpu", seed=seed, **settings)
    model.learn(arguments["total_timesteps"])
    # Some environments have no time limit.
    longest = env.get_attr("spec")[0].max_episode_steps or arguments["longest"]
    ended = kwargs | {"max_episode_steps": longest}
    unseen: Any = make_vec_env(name, n_envs=1, seed=seed + 10_000, env_kwargs=ended)
    if arguments["normalize"]:
        theirs = env.obs_rms if arguments["normalize"]["norm_obs"] else None
        unseen = VecNormalize(
            unseen, training=False, **arguments["normalize"] | {"norm_reward": False}
        )
        unseen.obs_rms = theirs
    score: Any = evaluate_policy(model, unseen, n_eval_episodes=arguments["episodes"])[0]
    return float(score)


def _with_filters(policy: Mapping[str, Any], *, shared: bool) -> dict[str, Any]:
    """Return policy arguments that add our CNN of 16 filters for board observations.

    Stable-Baselines3 has no CNN for images so small; without it the networks would differ.
    """
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from torch import Tensor, nn

    hidden = policy["net_arch"] if shared else []

    class Board(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            height, width, channels = space.shape
            size = 16 * (height - 2) * (width - 2)
            super().__init__(space, hidden[-1] if hidden else size)
            layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten()]
            for wide in hidden:
                layers += [nn.Linear(size, wide), policy["activation_fn"]()]
                size = wide
            self.layers = nn.Sequential(*layers)

        def forward(self, obs: Tensor) -> Tensor:
            features: Tensor = self.layers(obs.movedim(3, 1))
            return features

    arch = [] if shared else policy["net_arch"]
    return {"features_extractor_class": Board, "net_arch": arch}


def _falling(value: Any) -> Any:
    """Return a linear schedule to 0 for [start]; other values unchanged."""
    return (lambda left: left * value[0]) if isinstance(value, list) else value


def race_rejax(arguments: Mapping[str, Any]) -> float:
    """Train and evaluate rejax's PPO with `race.for_rejax`'s settings; return its score."""
    import jax
    import rejax

    algorithm = rejax.get_algo("ppo").create(**arguments["config"])
    _, (_, returns) = jax.jit(algorithm.train)(jax.random.PRNGKey(arguments["seed"]))
    return float(returns[-1].mean())


if __name__ == "__main__":  # contestant process: imports nothing else
    contestant = {"sb3": race_sb3, "rejax": race_rejax}[sys.argv[1]]
    print(json.dumps(contestant(json.loads(sys.argv[2]))))
