"""Memory of construction and updates: a minibatch at a time, checked before it is allocated."""

import weakref

import pytest
import torch
from changed import changed
from ppo_agents import CPU, SETTINGS, Episodes, build, collect
from torch.utils._python_dispatch import TorchDispatchMode

from steadyrl.agents.ppo.agent import PPO
from steadyrl.core.errors import MemoryBudgetError
from steadyrl.envs.types import DiscreteActions, EnvSpec
from steadyrl.memory.cache_cleaner import reclaim
from tests.agents.learner.test_learner import as_traced


class Storages(TorchDispatchMode):
    """Track the bytes of all storages allocated inside: their peak, and the largest one."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._made(tensor, old)
        return out

    def _made(self, tensor, old):
        key, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if key in old or key in self.alive:
            return  # a view, or written in place
        self.alive[key] = nbytes
        weakref.finalize(tensor, self.alive.pop, key, None)
        self.largest = max(self.largest, nbytes)
        self.peak = max(self.peak, sum(self.alive.values()))


@pytest.mark.parametrize("normalise", [False, True])
def test_an_update_allocates_a_minibatch_and_no_copy_of_the_rollout(normalise):
    wide = (2048,)
    agent = build(
        2, shape=wide, hidden=(1,), rollout_steps=64, minibatches=16, normalize_obs=normalise
    )
    env = Episodes(2, wide)
    obs = env.reset()
    for _ in range(2):  # the second rollout has no warm-up
        obs = collect(agent, env, obs, 64)
        with Storages() as made:
            agent.update()
    rollout = agent._rollout.obs.nbytes
    minibatch = rollout / 16
    assert minibatch / 2 < made.largest < 2.5 * minibatch, "in float64, for the statistics"
    assert made.peak < rollout / 2


def test_tracing_makes_no_copy_of_the_rollout():
    wide = (2048,)
    agent = build(2, shape=wide, hidden=(1,), rollout_steps=64, minibatches=16, compile="true")
    as_traced(agent._learner)
    agent._targets.evaluator._graph = agent._targets.evaluator.value = None  # these need a compiler
    collect(agent, env := Episodes(2, wide), env.reset(), 64)
    with Storages() as made:
        agent.update()
    assert agent.updates == 2 * 16
    assert made.largest < 2.5 * agent._rollout.obs.nbytes / 16
    assert made.peak < agent._rollout.obs.nbytes / 2


def test_the_memory_plan_covers_the_agents_allocations():
    agent = build()
    flat = agent._learner.network.weights.nbytes
    assert agent.nbytes()["networks"] == 4 * flat
    assert agent.nbytes()["rollout"] > agent._rollout.nbytes


@pytest.mark.parametrize("changes", [{"rollout_steps": 10**9}, {"hidden": (10**6, 10**6)}])
def test_memory_is_checked_before_large_allocations(changes):
    spec = EnvSpec("Huge", 8, (4,), "float32", 1, DiscreteActions(2))
    with Storages() as made, pytest.raises(MemoryBudgetError, match="rollout needs"):
        PPO(changed(SETTINGS, **changes), spec, device=CPU, seed=0, total_steps=10**11)
    assert made.largest < 1_000_000


@pytest.mark.parametrize("compile", ["false", "true"])
def test_release_frees_the_networks(compile):
    agent = build(compile=compile)
    held = weakref.ref(agent._learner.network), weakref.ref(agent._learner.network.module)
    agent.release()
    reclaim(CPU)  # the learner is part of a reference cycle
    assert [each() for each in held] == [None, None]
