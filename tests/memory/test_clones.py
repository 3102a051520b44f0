import queue
import threading

import pytest
import torch
from torch import nn

from memory.clones import clone_for_inference
from memory.tensors import reachable_tensors


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)
        )
        self.register_buffer("scale", torch.ones(2))
        self.plain = torch.ones(3)

    def forward(self, x):
        return self.layers(x) * self.scale


def storages(network):
    return {t.untyped_storage().data_ptr() for _, t in reachable_tensors(network, "network")}


def flat(network):
    """Make all weights views of one tensor, as fused optimizers do."""
    parameters = list(network.parameters())
    weights = torch.cat([p.detach().reshape(-1) for p in parameters])
    gradient = torch.zeros_like(weights)
    start = 0
    for p in parameters:
        end = start + p.numel()
        p.data, p.grad = weights[start:end].view(p.shape), gradient[start:end].view(p.shape)
        start = end
    return weights


@pytest.mark.parametrize("layout", ["separate", "flat"])
def test_the_clone_shares_nothing_and_is_frozen(layout):
    network = Net()
    if layout == "flat":
        flat(network)
    else:
        network(torch.ones(3, 4)).sum().backward()
    clone = clone_for_inference(network)
    assert storages(clone).isdisjoint(storages(network))
    assert not clone.training and network.training
    assert all(not p.requires_grad and p.grad is None for p in clone.parameters())
    assert all(p.requires_grad and p.grad is not None for p in network.parameters())
    network.eval()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(clone(x), network(x))
    before = clone(x)
    with torch.no_grad():
        for tensor in [*network.parameters(), *network.buffers(), network.plain]:
            tensor.fill_(9)
    assert torch.equal(clone(x), before)


def train(network, rounds, after_each):
    """Give all weights the value of the round, layer by layer, as an optimizer would."""
    for number in range(1, rounds + 1):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(float(number))
        after_each(number)


def torn(network):
    values = {p.view(-1)[0].item() for p in network.parameters()}
    return len(values) > 1


def deep():
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))


def test_evaluation_threads_never_see_half_updated_weights():
    network, tasks, seen = deep(), queue.Queue(), []

    def evaluate():
        while (task := tasks.get()) is not None:
            number, clone = task
            for _ in range(5):
                values = {p.unique().item() for p in clone.parameters()}
                seen.append(values == {float(number)})

    threads = [threading.Thread(target=evaluate) for _ in range(3)]
    for thread in threads:
        thread.start()
    train(network, 200, lambda n: n % 10 or tasks.put((n, clone_for_inference(network))))
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        thread.join()
    assert len(seen) == 100 and all(seen)


def test_the_live_network_does_show_half_updated_weights():
    """The control: without a clone, the same threads do see what must not be seen."""
    network, in_between, looked = deep(), threading.Event(), threading.Event()
    observed = []

    def look():
        in_between.wait()
        observed.append(torn(network))
        looked.set()

    thread = threading.Thread(target=look)
    thread.start()
    with torch.no_grad():
        for index, parameter in enumerate(network.parameters()):
            parameter.fill_(1.0)
            if index == 30:
                in_between.set()
                looked.wait()
    thread.join()
    assert observed == [True]
