"""On a CUDA device, every optimiser: nothing waits, memory is constant, graphs learn the same."""

import pytest
import torch
from changed import changed

from steadyrl.agents.dqn.build import build_loss_spec
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from tests.agents.dqn.test_agent import SETTINGS
from tests.agents.learner.optimizers.test_optimizers import NAMES, q_network
from tests.agents.learner.test_learner import replay_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def learner(mode, name):
    settings = changed(SETTINGS, optimizer__name=name, optimizer__weight_decay=0.1)
    online, target = (FlatNetwork(q_network(seed), torch.device("cuda")) for seed in (0, 1))
    return Learner(build_loss_spec(settings), online, mode, frozen=(target,))


def batches(steps):
    drawn = [replay_batch(12, i) for i in steps]
    return [type(each)(*(part.cuda() for part in each)) for each in drawn]


def learn(made, given):
    for i, batch in enumerate(given):
        made.step(batch, 1e-3 / (1 + i % 4))
    return made.network.weights, *made.optimizer_state


@pytest.mark.parametrize("mode", ["direct", "cudagraph"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_synchronises_and_keeps_no_memory(name, mode):
    made = learner(mode, name)
    learn(made, batches(range(6)))
    given = batches(range(6, 16))
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        learn(made, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("name", NAMES)
def test_graphs_learn_the_same_as_eager_steps_also_resumed(name):
    direct, graph, resumed = (learner(mode, name) for mode in ("direct", "cudagraph", "cudagraph"))
    for made in (direct, graph):
        learn(made, batches(range(20)))
    resumed.load_state_dict(graph.state_dict())
    found = [learn(made, batches(range(20, 26))) for made in (direct, graph, resumed)]
    for one, other, third in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert torch.equal(other, third)
