"""Every engine's step is the reference's: on the host eager ones to the last bit."""

import pytest
import torch
from changed import changed

from steadyrl.agents.dqn.build import build_loss_spec
from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.engine.direct import DirectEngine
from steadyrl.agents.engine.eager import EagerEngine
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from tests.agents.dqn.test_agent import SETTINGS
from tests.agents.learner.test_learner import as_traced, q_network, replay_batch

CPU = torch.device("cpu")


def learner(engine, **changes):
    online, target = (FlatNetwork(q_network(seed), CPU) for seed in (0, 1))
    settings = changed(SETTINGS, **changes)
    return Learner(build_loss_spec(settings), online, engine, frozen=(target,))


def trained(made):
    """Return weights, Adam's state, the last aux outputs and the metrics after some steps."""
    for i, rate in enumerate((1e-3, 1e-3, 5e-4, 2e-4)):
        (td_error,) = made.step(replay_batch(12, i), rate)
    return made.network.weights, *made.adam, td_error, made.means().values


@pytest.mark.parametrize("changes", [{}, {"grad_accumulation": 3}, {"max_grad_norm": 0.1}])
def test_direct_steps_are_the_references_to_the_last_bit(changes):
    reference, direct = (trained(learner(e, **changes)) for e in (EagerEngine(), "eager"))
    assert not torch.equal(reference[0], learner("eager").network.weights)
    assert all(torch.equal(a, b) for a, b in zip(reference, direct, strict=True))


@pytest.mark.parametrize("changes", [{}, {"grad_accumulation": 3}, {"max_grad_norm": 0.1}])
def test_traced_steps_are_nearly_the_references(changes):
    reference = trained(learner(EagerEngine(), **changes))
    for a, b in zip(reference, trained(as_traced(learner("compiled", **changes))), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", [0.05, torch.linspace(0, 0.1, 12)])
def test_samples_weigh_as_much_in_every_engine(weight):
    found = []
    for engine in (EagerEngine(), DirectEngine()):
        made = learner(engine)
        made.sample_weight = weight
        found.append(trained(made))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_engine_is_chosen_by_its_mode_or_handed_in():
    given = EagerEngine()
    assert engine_of(given) is given
    assert type(engine_of("eager")) is DirectEngine
