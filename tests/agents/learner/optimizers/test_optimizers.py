"""Every optimiser against torch's own over 60 steps, in every form that engines run."""

import pytest
import torch
from changed import changed
from torch import nn

from steadyrl.agents.dqn.build import build_loss_spec
from steadyrl.agents.engine.direct import DirectEngine
from steadyrl.agents.engine.eager import EagerEngine
from steadyrl.agents.engine.inductor import InductorEngine
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.interrupt import Interrupted
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.optimizers.optimizer import build_optimizer
from steadyrl.agents.learner.optimizers.settings import OptimizerSettings
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.core.errors import SettingError
from tests.agents.dqn.test_agent import SETTINGS
from tests.agents.learner.test_learner import as_traced, line, points, replay_batch

CPU = torch.device("cpu")
STEPS = 60
NAMES = ("adam", "adamw", "radam", "muon")
OTHERS = ("adamw", "radam", "muon")


def q_network(seed, hidden=(8, 6, 8)):
    torch.manual_seed(seed)
    return QNetwork((4,), "float32", 3, hidden, True)


def hidden_weights(network):
    """Return the parameters that Muon trains, and the others."""
    named = dict(network.named_parameters())
    matrices = [named.pop(f"trunk.layers.{i}.weight") for i in (1, 2)]
    return matrices, list(named.values())


@pytest.fixture
def in_float32(monkeypatch):
    """Let torch's Muon orthogonalise in float32, as ours does, so that digits can be compared."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


def torch_optimizers(name, network, eps, decay):
    common = {"lr": 0.0, "eps": eps, "weight_decay": decay}
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": torch.optim.RAdam}
    if name in kinds:
        return [kinds[name](network.parameters(), **common)]
    matrices, others = hidden_weights(network)
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, **common)]


@pytest.mark.parametrize("form", ["step_", "traceable_step_"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_weights_equal_those_of_torch(name, decay, form, in_float32):
    net, reference = FlatNetwork(q_network(0), CPU), q_network(0)
    settings = OptimizerSettings(name=name, eps=1e-5, weight_decay=decay)
    optimizer, theirs = (
        build_optimizer(settings, net),
        torch_optimizers(name, reference, 1e-5, decay),
    )
    random = torch.Generator().manual_seed(1)
    for i in range(STEPS):
        rate = 1e-2 * (1 - i / STEPS)
        net.gradient.normal_(generator=random).mul_(0.1 + i % 3)
        for parameter, gradient in zip(
            reference.parameters(), net.views(net.gradient).values(), strict=True
        ):
            parameter.grad = gradient.clone()
        for each in theirs:
            each.param_groups[0]["lr"] = rate
            each.step()
        getattr(optimizer, form)(net.weights, net.gradient, optimizer.state, torch.tensor(rate))
    expected = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
    torch.testing.assert_close(net.weights, expected, rtol=1e-4, atol=2e-5)
    assert (net.weights - FlatNetwork(q_network(0), CPU).weights).abs().max() > 0.05
    assert optimizer.state.step == STEPS


def learner(engine, name, **changes):
    settings = changed(SETTINGS, optimizer__name=name, **changes)
    online, target = (FlatNetwork(q_network(seed), CPU) for seed in (0, 1))
    return Learner(build_loss_spec(settings), online, engine, frozen=(target,))


def trained(made, steps=STEPS):
    for i in range(steps):
        (td_error,) = made.step(replay_batch(12, i), 1e-3 / (1 + i % 4))
    return made.network.weights, *made.optimizer_state, td_error, made.means().values


CHANGES = [{}, {"grad_accumulation": 3, "max_grad_norm": 0.1, "optimizer__weight_decay": 0.1}]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_direct_steps_are_the_references_to_the_last_bit(name, changes):
    reference, direct = (
        trained(learner(engine, name, **changes), 5) for engine in (EagerEngine(), DirectEngine())
    )
    assert all(torch.equal(a, b) for a, b in zip(reference, direct, strict=True))


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_traced_steps_are_nearly_the_references(name, changes):
    reference = trained(learner(EagerEngine(), name, **changes))
    graph = trained(as_traced(learner(InductorEngine(), name, **changes)))
    for a, b in zip(reference, graph, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_compiled_steps_are_nearly_the_references(name, caplog):
    reference = trained(learner(EagerEngine(), name))
    compiled = trained(learner("compiled", name))
    for a, b in zip(reference, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert "running eagerly" not in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_names_mean_different_steps(name):
    first = trained(learner("direct", name, optimizer__weight_decay=0.1), 3)[0]
    for other in set(NAMES) - {name}:
        assert not torch.equal(
            first, trained(learner("direct", other, optimizer__weight_decay=0.1), 3)[0]
        )


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_resuming_is_bitwise_exact(name, graph):
    def fresh():
        made = learner("compiled" if graph else "direct", name, optimizer__weight_decay=0.1)
        return as_traced(made) if graph else made

    straight, resumed = fresh(), fresh()
    trained(straight, 7)
    resumed.load_state_dict(straight.state_dict())
    for made in (straight, resumed):
        made.step(replay_batch(12, 9), 1e-3)
    assert torch.equal(straight.network.weights, resumed.network.weights)
    for a, b in zip(straight.optimizer_state, resumed.optimizer_state, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OTHERS)
def test_an_interrupted_transaction_restores_every_moment(name):
    made = learner("direct", name)
    trained(made, 3)
    before = made.state_dict()
    with pytest.raises(Interrupted), made.transaction():
        made.step(replay_batch(12, 5), 1e-2)
        assert not torch.equal(made.network.weights, before["network"]["weights"])
        raise Interrupted
    assert torch.equal(made.network.weights, before["network"]["weights"])
    for key, moment in before["optimizer_state"].items():
        assert torch.equal(getattr(made.optimizer_state, key), moment), key


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", ["adamw", "radam"])
def test_a_step_that_exceeds_the_limit_is_undone(name, graph):
    settings = OptimizerSettings(name=name, eps=1e-8, weight_decay=0.1)
    mode, watched = "compiled" if graph else "direct", "train/error"
    made = line(mode=mode, watched=watched, limit=1e-3, optimizer=settings)
    if graph:
        as_traced(made)
    before = made.state_dict()
    made.step(points(6), 1e-2)
    assert made.limit_exceeded and made.updates == 0
    assert torch.equal(before["network"]["weights"], made.network.weights)
    for key, moment in before["optimizer_state"].items():
        assert torch.equal(getattr(made.optimizer_state, key), moment), key


@pytest.mark.parametrize(
    ("name", "key", "number", "said"),
    [
        ("radam", "step", 3.0, "optimizer_state.step: is 3 after 2 updates"),
        ("adamw", "exp_avg", 1e12, "optimizer_state.exp_avg: is larger"),
        ("muon", "momentum", 1e16, "optimizer_state.momentum: holds a number beyond"),
        ("muon", "exp_avg_sq", -1.0, "optimizer_state.exp_avg_sq: holds a number outside"),
    ],
)
def test_impossible_states_are_refused(name, key, number, said):
    made = learner("direct", name)
    trained(made, 2)
    state = made.state_dict()
    state["optimizer_state"][key].fill_(number)
    with pytest.raises(ValueError, match=said):
        learner("direct", name).load_state_dict(state)


def test_muon_needs_a_matrix_between_hidden_layers():
    made = OptimizerSettings(name="muon", eps=1e-5, weight_decay=0.0)
    for module in (q_network(0, hidden=(8,)), nn.Linear(3, 3)):
        with pytest.raises(
            SettingError, match=r"agent.optimizer.name=muon: is for matrices between"
        ):
            build_optimizer(made, FlatNetwork(module, CPU))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eps": 0.0}, "eps=0.0: must be between 1e-30 and 1"),
        ({"eps": 2.0}, "eps=2.0: must be between"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: must be 0 or more"),
        ({"weight_decay": 1e4}, "weight_decay=10000.0: must be at most 1,000"),
    ],
)
def test_impossible_settings_are_refused(changes, said):
    with pytest.raises(SettingError, match=said):
        OptimizerSettings(**{"name": "adamw", "eps": 1e-8, "weight_decay": 0.0} | changes)


def test_a_decay_beyond_the_weights_is_refused():
    with pytest.raises(
        SettingError, match=r"optimizer.weight_decay=100: times agent.learning_rate"
    ):
        changed(SETTINGS, learning_rate=0.01, optimizer__name="adamw", optimizer__weight_decay=100)
    changed(SETTINGS, learning_rate=0.01, optimizer__weight_decay=100)  # part of the gradient


def test_a_decay_beyond_the_weights_at_the_end_of_a_schedule_is_refused():
    rising = {"learning_rate": 0.001, "anneal_learning_rate": "linear", "learning_rate_end": 0.1}
    with pytest.raises(SettingError, match=r"times agent.learning_rate_end=0.1 must be below 1"):
        changed(SETTINGS, **rising, optimizer__name="adamw", optimizer__weight_decay=10)
