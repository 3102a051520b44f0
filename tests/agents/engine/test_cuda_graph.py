"""CUDA-graphed updates learn bitwise the same; graphs are emulated on the host here."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import tape
import torch
from card import META, Card
from changed import changed
from ppo_agents import CPU, Episodes, collect
from ppo_agents import build as build_ppo

from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.dqn.build import build_loss_spec
from steadyrl.agents.engine import choice, direct
from steadyrl.agents.engine.direct import DirectEngine
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.buffers.replay import block_sums
from steadyrl.buffers.replay import build as replay_build
from steadyrl.core import cuda_graph as recording
from steadyrl.core.cuda_graph import CudaGraphed
from steadyrl.core.errors import NonFiniteError
from steadyrl.envs.types import DiscreteActions, EnvSpec
from tests.agents.dqn.test_agent import SETTINGS
from tests.agents.learner.optimizers.test_optimizers import (
    NAMES,
    STEPS,
    learner,
    q_network,
    trained,
)
from tests.agents.learner.test_learner import replay_batch


@pytest.fixture
def device(monkeypatch, caplog):
    """Treat the host as a device that captures graphs and is costly to synchronise."""
    caplog.set_level(logging.WARNING, "steadyrl")
    played = []

    def capture(function):
        play, outputs = tape.record(function)
        return lambda: (played.append(1), play()), outputs

    monkeypatch.setattr(recording, "capture", capture)
    monkeypatch.setattr(recording, "on_side_stream", lambda function: function())
    for module in (direct, block_sums):
        monkeypatch.setattr(module, "host_sees", lambda _: False)
    monkeypatch.setattr(replay_build, "choose_accelerator", lambda *_: CPU)
    yield played
    assert [r.getMessage() for r in caplog.records if "recorded" in r.getMessage()] == []


def run_in(monkeypatch, mode):
    monkeypatch.setattr(choice, "compile_mode", lambda *_, **__: mode)


def learned_by_dqn(mode, monkeypatch, **changes):
    run_in(monkeypatch, mode)
    monkeypatch.setattr(DirectEngine, "policy", lambda *_: None)  # as for weights on a device
    prioritized = changes.pop("prioritized")
    settings = changed(
        SETTINGS,
        replay__capacity=64,
        replay__prioritized=prioritized,
        learning_starts=0,
        batch_size=4,
        train_every=3,
        target_every=9,
        **changes,
    )
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, DiscreteActions(3))
    agent = DQN(settings, spec, device=CPU, seed=0, total_steps=10_000)
    env, metrics = Episodes(), []
    obs = env.reset()
    for _ in range(30):
        obs = collect(agent, env, obs, 1)
        found = agent.update()
        metrics += [] if found is None else [found.values]
    return agent._learner.network.weights, torch.stack(metrics), agent.updates


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"prioritized": False}, marks=pytest.mark.slow),
        pytest.param(
            {"prioritized": True, "n_step": 3, "dueling": True, "double": True},
            marks=pytest.mark.slow,
        ),
        {
            "prioritized": True,
            "noisy__enabled": True,
            "distribution__kind": "c51",
            "grad_accumulation": 2,
        },
        pytest.param(
            {"prioritized": True, "distribution__kind": "quantile", "munchausen__enabled": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_dqn_with_cuda_graphs_learns_bitwise_the_same(device, monkeypatch, changes):
    direct = learned_by_dqn("direct", monkeypatch, **changes)
    assert device == []
    played = learned_by_dqn("cudagraph", monkeypatch, **changes)
    assert played[2] == direct[2] > 20
    assert len(device) >= (3 if changes["prioritized"] else 2) * (direct[2] - CudaGraphed.WARM_UP)
    torch.testing.assert_close(played[0], direct[0], rtol=0, atol=0)
    torch.testing.assert_close(played[1], direct[1], rtol=0, atol=0)


def learned_by_ppo(mode, monkeypatch, **changes):
    run_in(monkeypatch, mode)
    agent, env = build_ppo(**changes), Episodes()
    obs, metrics = env.reset(), []
    for _ in range(4):
        obs = collect(agent, env, obs, 16)
        metrics.append(agent.update().values)
    return agent._learner.network.weights, torch.stack(metrics)


@pytest.mark.parametrize(
    "changes",
    [
        {"minibatches": 5, "normalize_obs": True},
        {
            "clip_value": True,
            "anneal_clip": "linear",
            "anneal_entropy_coef": "linear",
            "target_kl": 0.01,
        },
        {"recurrent__cell": "gru", "recurrent__sequence_length": 4, "minibatches": 2},
        {"adapt_learning_rate": "kl", "anneal_learning_rate": "constant", "target_kl": 1e-3},
    ],
)
def test_ppo_with_cuda_graphs_learns_bitwise_the_same(device, monkeypatch, changes):
    # Acting in torch is captured too. Sums of padded batches differ in the last digit.
    monkeypatch.setattr(DirectEngine, "policy", lambda self, network: None)
    direct, played = (
        learned_by_ppo(mode, monkeypatch, **changes) for mode in ("direct", "cudagraph")
    )
    assert len(device) > 10
    for one, other in zip(direct, played, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes", [{}, {"grad_accumulation": 3, "max_grad_norm": 0.1, "optimizer__weight_decay": 0.1}]
)
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_with_cuda_graphs_learns_bitwise_the_same(device, name, changes):
    direct, played = (trained(learner(mode, name, **changes)) for mode in ("direct", "cudagraph"))
    assert len(device) == STEPS - CudaGraphed.WARM_UP
    for one, other in zip(direct, played, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_resuming_an_optimizer_in_a_cuda_graph_is_bitwise_exact(device, name, captured):
    straight, resumed = (learner("cudagraph", name, optimizer__weight_decay=0.1) for _ in range(2))
    trained(straight, 9)
    if captured:  # a state is loaded into the memory that the graph reads
        trained(resumed, 6)
    resumed.load_state_dict(straight.state_dict())
    device.clear()
    found = [trained(made, 6) for made in (straight, resumed)]
    assert len(device) == 6 + (6 if captured else 6 - CudaGraphed.WARM_UP)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_step_that_exceeds_the_limit_is_undone(device, name):
    settings = changed(SETTINGS, optimizer__name=name, optimizer__weight_decay=0.1)
    spec = replace(build_loss_spec(settings), watched="train/td_error", limit=1e9)
    online, target = (FlatNetwork(q_network(seed), CPU) for seed in (0, 1))
    made = Learner(spec, online, "cudagraph", frozen=(target,))
    trained(made, 5)
    before = made.state_dict()
    batch = replay_batch(12, 5)
    made.step(batch._replace(reward=batch.reward + 1e10), 1e-2)
    assert made.limit_exceeded and made.updates == 5 and len(device) == 3
    assert torch.equal(before["network"]["weights"], made.network.weights)
    for key, moment in before["optimizer_state"].items():
        assert torch.equal(getattr(made.optimizer_state, key), moment), key


def test_a_non_finite_priority_raises_one_update_later(device):
    sums = block_sums.BlockSums(8, 1.0, CPU, cuda_graph=True)
    sums.add_and_evict(torch.arange(8), torch.arange(0))
    index = torch.tensor([1, 3])
    for _ in range(5):
        sums.update(index, torch.ones(2))
    assert len(device) == 2
    sums.update(index, torch.tensor([2.0, math.nan]))
    with pytest.raises(NonFiniteError, match=r"td_error\[1\]=nan for transition 3"):
        sums.update(index, torch.ones(2))


def test_other_shapes_than_the_captured_ones_run_eagerly(device):
    total = CudaGraphed(lambda x: x.sum(), "a sum")
    for n in (3, 3, 3, 3, 3, 1, 5):
        assert total(torch.ones(n)).item() == n
    assert len(device) == 2


def test_copied_outputs_are_not_overwritten(device):
    double = CudaGraphed(lambda x: x * 2, "a test", copies_inputs=True)
    rows = torch.arange(8.0)
    found = [double(rows[i : i + 1]).item() for i in range(8)]
    assert found == (2 * torch.arange(8.0)).tolist() == (2 * rows).tolist()
    assert len(device) == 5


def test_functions_that_synchronise_are_not_captured(device, caplog):
    looking = CudaGraphed(lambda x: x * x.sum().item(), "a test")
    for _ in range(5):
        assert looking(torch.full((2,), 3.0)).tolist() == [18.0, 18.0]
    assert device == []
    assert [r.getMessage() for r in caplog.records] == [
        "cannot capture a test as a CUDA graph, running eagerly: RuntimeError: operation not "
        "permitted when stream is capturing: _local_scalar_dense"
    ]
    caplog.clear()


def test_the_fake_device_counts_synchronisations_and_copies():
    card = Card()
    with card:
        x = torch.zeros(3, device=META)
        assert card.take().launches == 1
        x.sum().item()
        x.cpu()
        x.copy_(torch.ones(3), non_blocking=True)
        counts = card.take()
        assert (counts.launches, counts.there, counts.back) == (1, 1, 1)
        assert counts.waits == ("_local_scalar_dense", "copy to cpu")
        with pytest.raises(AssertionError, match="of the host and of the device"):
            x + torch.from_numpy(np.ones(3, np.float32))
        assert len(card.alive) == 1
        sum_ = x + 1
        assert len(card.alive) == 2
        del sum_
        assert len(card.alive) == 1
