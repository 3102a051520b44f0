"""Hooks of extensions get what their docstrings say."""

import pytest
import torch
from ppo_agents import Episodes, build, collect, extension

from steadyrl.agents.extension import Extension


class Recorder(Extension):
    """Keep what `after_targets` gets."""

    def after_targets(self, next_obs):
        """Copy it, as it may lie in a buffer of the agent."""
        self.next_obs = next_obs.clone()


@pytest.mark.parametrize("normalised", [False, True])
def test_the_last_observation_continues_those_of_the_rollout(normalised):
    agent, env = build(normalize_obs=normalised), Episodes(scale=3.0)
    agent._extensions = (recorder := Recorder(),)
    obs = collect(agent, env, env.reset(), 16)
    normaliser = agent._learner.network.module.normaliser
    with torch.no_grad():
        stored = normaliser(torch.from_numpy(obs)) if normalised else torch.from_numpy(obs)
    agent.update()
    assert torch.equal(recorder.next_obs, stored)
    assert not recorder.next_obs.is_inference(), "it may enter a loss"
    obs = collect(agent, env, obs, 16)
    agent.update()
    assert torch.equal(recorder.next_obs, torch.from_numpy(obs)), "later rollouts are raw"


def test_rnd_reads_raw_observations_only():
    agent, env = build(normalize_obs=True, rnd__coef=1.0), Episodes(scale=3.0)
    rnd = extension(agent)._rnd
    obs = collect(agent, env, env.reset(), 16)
    agent.update()
    assert not rnd._outputs.last.any(), "the first rollout has normalised ones"
    obs = collect(agent, env, obs, 16)
    agent.update()
    assert torch.equal(rnd._outputs.last, torch.from_numpy(obs))
