"""On a CUDA device: updates never synchronise, memory is constant, graphs learn the same."""

from dataclasses import replace

import pytest
import torch
from ppo_agents import Episodes, collect

from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.engine.cpu import host_weights as mirror
from steadyrl.envs.types import DiscreteActions, EnvSpec
from tests.agents.dqn.test_agent import SETTINGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def acting(monkeypatch):
    monkeypatch.setattr(mirror, "is_faster_on_host", lambda *_, **__: True)


def build(compile, home, prioritized):
    settings = replace(
        SETTINGS,
        compile=compile,
        learning_starts=0,
        train_every=3,
        updates_per_train=1,
        replay=replace(SETTINGS.replay, capacity=500, device=home, prioritized=prioritized),
    )
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, DiscreteActions(3))
    return DQN(settings, spec, device=torch.device("cuda"), seed=0, total_steps=10**6)


def learn(agent, env, obs, rows):
    for _ in range(rows):
        obs = collect(agent, env, obs, 1)
        agent.update()
    return obs


WAYS = pytest.mark.parametrize(
    ("compile", "home", "prioritized"),
    [
        (compile, home, prioritized)
        for compile in ("false", "cudagraph")
        for home in ("cpu", "cuda")
        for prioritized in (False, True)
    ],
)


@WAYS
def test_an_update_never_synchronises(compile, home, prioritized):
    agent, env = build(compile, home, prioritized), Episodes()
    obs = learn(agent, env, env.reset(), 30)
    collect(agent, env, obs, 1)
    before = agent.updates
    torch.cuda.set_sync_debug_mode("error")
    try:
        agent.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert agent.updates > before


@WAYS
def test_device_memory_is_the_same_after_many_updates(compile, home, prioritized):
    agent, env = build(compile, home, prioritized), Episodes()
    obs = learn(agent, env, env.reset(), 30)
    before = torch.cuda.memory_allocated()
    learn(agent, env, obs, 200)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_cuda_graphs_learn_the_same_as_eager_updates(home):
    weights = []
    for compile in ("false", "cudagraph"):
        agent, env = build(compile, home, True), Episodes()
        learn(agent, env, env.reset(), 20)
        weights.append(agent._learner.network.weights.clone())
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-4)
