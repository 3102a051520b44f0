"""A saved policy acts exactly as its agent did, without the agent's training state."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from changed import changed
from ppo_agents import CPU, SETTINGS, SPACES, Episodes, act, build, learn

from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.registry import finished_policy
from steadyrl.envs.types import DiscreteActions, EnvSpec
from tests.agents.dqn.test_agent import SETTINGS as DQN_SETTINGS


def decisions(actor, shape, dtype, envs=7):
    random = np.random.default_rng(0)
    found = []
    for _ in range(5):
        obs = random.normal(size=(envs, *shape)) * 3
        obs = (obs * 20 + 128).clip(0, 255).astype(dtype) if dtype == "uint8" else obs
        decided = actor.act(obs.astype(dtype), np.zeros(envs, dtype=bool))
        found.append(decided.env_action.clone())
    return torch.stack(found)


def saved(agent):
    """Return copies of the weights, as a file would hold them."""
    return {name: tensor.clone() for name, tensor in agent.weights().items()}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_saved_ppo_policies_act_like_the_agent(name, shared):
    changes = {"normalize_obs": True, "shared_trunk": shared, "learning_rate": 0.1}
    agent = build(action=SPACES[name], **changes)
    env = Episodes(scale=3.0)
    learn(agent, env, env.reset(), 3)
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES[name])
    actor = finished_policy(changed(SETTINGS, **changes), spec, saved(agent), device=CPU)
    mine = decisions(agent.actor(7, explore=False), (4,), "float32")
    assert torch.equal(decisions(actor, (4,), "float32"), mine)
    assert len(mine.flatten(0, 1).unique(dim=0)) > 1


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), [((4,), "float32"), ((2, 9, 9), "uint8")])
def test_saved_dqn_policies_act_like_the_agent(shape, dtype, dueling):
    settings = replace(DQN_SETTINGS, dueling=dueling)
    spec = EnvSpec("Synthetic", 2, shape, dtype, 1, DiscreteActions(5))
    agent = DQN(settings, spec, device=CPU, seed=3, total_steps=1000)
    actor = finished_policy(settings, spec, saved(agent), device=CPU)
    agent_decides = decisions(agent.actor(7, explore=False), shape, dtype)
    agent.release()
    assert torch.equal(decisions(actor, shape, dtype), agent_decides)
    assert len(agent_decides.unique()) > 1


def test_saved_ppo_policies_on_images_act_like_the_agent():
    agent = build(2, shape=(2, 9, 9), dtype="uint8")
    spec = EnvSpec("Synthetic", 2, (2, 9, 9), "uint8", 1, SPACES["discrete"])
    actor = finished_policy(SETTINGS, spec, saved(agent), device=CPU)
    mine = decisions(agent.actor(7, explore=False), (2, 9, 9), "uint8")
    assert torch.equal(decisions(actor, (2, 9, 9), "uint8"), mine)


def test_a_saved_policy_does_not_change_with_the_agent():
    agent = build(learning_rate=0.1)
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES["discrete"])
    actor = finished_policy(SETTINGS, spec, agent.weights(), device=CPU)
    before = decisions(actor, (4,), "float32")
    agent._learner.network.weights.normal_(generator=torch.Generator().manual_seed(0))
    assert torch.equal(decisions(actor, (4,), "float32"), before)
    obs = np.ones((3, 4), dtype=np.float32)
    assert act(agent, obs, explore=False).env_action.shape == (3,)


def test_weights_of_another_network_are_rejected_with_every_difference():
    agent = build(hidden=(8,))
    weights = saved(agent)
    weights["extra"] = weights.pop("value.bias")
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES["discrete"])
    with pytest.raises(
        ValueError, match=r"policy.weight has shape \[3, 8\], not \[3, 16\].*value.bias is missing"
    ):
        finished_policy(SETTINGS, spec, weights, device=CPU)
