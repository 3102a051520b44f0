"""On a CUDA device: updates never synchronise, memory is constant, a graph learns the same."""

import pytest
import torch
from changed import changed
from ppo_agents import SETTINGS, Episodes, collect, learn

from steadyrl.agents.engine.cpu import host_weights as mirror
from steadyrl.agents.ppo.agent import PPO
from steadyrl.envs.types import DiscreteActions, EnvSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True, params=["host", "device"])
def acting(request, monkeypatch):
    """Act on the given side, whichever is faster."""
    monkeypatch.setattr(mirror, "is_faster_on_host", lambda *_, **__: request.param == "host")


def build(**changes):
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, DiscreteActions(3))
    settings = changed(SETTINGS, normalize_obs=True, **changes)
    return PPO(settings, spec, device=torch.device("cuda"), seed=0, total_steps=10**6)


@pytest.mark.parametrize("mode", ["false", "cudagraph"])
def test_an_update_never_synchronises(mode):
    agent, env = build(compile=mode), Episodes()
    _, obs = learn(agent, env, env.reset(), 2)
    collect(agent, env, obs, 16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert agent.update() is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["false", "cudagraph"])
def test_device_memory_is_the_same_after_many_iterations(mode):
    agent, env = build(compile=mode), Episodes()
    _, obs = learn(agent, env, env.reset(), 10)
    before = torch.cuda.memory_allocated()
    learn(agent, env, obs, 40)
    assert torch.cuda.memory_allocated() == before


def test_the_cuda_graph_learns_the_same_as_eager_updates():
    weights = []
    for mode in ("false", "cudagraph"):
        agent, env = build(compile=mode), Episodes(mean_length=1e9)
        learn(agent, env, env.reset(), 1)
        weights.append(agent._learner.network.weights.clone())
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-4)
