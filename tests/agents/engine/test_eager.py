"""Every engine's step is the reference's: on the host direct ones to the last bit."""

import pytest
import torch
from changed import changed

from steadyrl.agents.dqn.build import build_loss_spec
from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.engine.cpu.policy import policy_on_host, q_on_host, value_on_host
from steadyrl.agents.engine.direct import DirectEngine
from steadyrl.agents.engine.eager import EagerEngine
from steadyrl.agents.engine.engine import compile_mode
from steadyrl.agents.engine.inductor import InductorEngine
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import build_head
from steadyrl.agents.networks.settings import PLAIN
from steadyrl.core.errors import SettingError
from steadyrl.core.gates.torch_private import TORCH
from steadyrl.envs.types import DiscreteActions
from tests.agents.dqn.test_agent import SETTINGS
from tests.agents.learner.test_learner import as_traced, q_network, replay_batch
from tests.core.gates.test_gates import run as run_small

CPU = torch.device("cpu")


def learner(engine, **changes):
    online, target = (FlatNetwork(q_network(seed), CPU) for seed in (0, 1))
    settings = changed(SETTINGS, **changes)
    return Learner(build_loss_spec(settings), online, engine, frozen=(target,))


def trained(made):
    """Return weights, Adam's state, the last aux outputs and the metrics after some steps."""
    for i, rate in enumerate((1e-3, 1e-3, 5e-4, 2e-4)):
        (td_error,) = made.step(replay_batch(12, i), rate)
    return made.network.weights, *made.optimizer_state, td_error, made.means().values


@pytest.mark.parametrize("changes", [{}, {"grad_accumulation": 3}, {"max_grad_norm": 0.1}])
def test_direct_steps_are_the_references_to_the_last_bit(changes):
    reference, direct = (trained(learner(e, **changes)) for e in (EagerEngine(), DirectEngine()))
    assert not torch.equal(reference[0], learner("direct").network.weights)
    assert all(torch.equal(a, b) for a, b in zip(reference, direct, strict=True))


@pytest.mark.parametrize("changes", [{}, {"grad_accumulation": 3}, {"max_grad_norm": 0.1}])
def test_traced_steps_are_nearly_the_references(changes):
    reference = trained(learner(EagerEngine(), **changes))
    for a, b in zip(
        reference, trained(as_traced(learner(InductorEngine(), **changes))), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", [0.05, torch.linspace(0, 0.1, 12)])
def test_samples_weigh_as_much_in_every_engine(weight):
    found = []
    for engine in (EagerEngine(), DirectEngine()):
        made = learner(engine)
        made.sample_weight = weight
        found.append(trained(made))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_engine_is_chosen_by_its_mode_or_handed_in(monkeypatch):
    monkeypatch.delenv("STEADYRL_ENGINE", raising=False)
    given = EagerEngine()
    assert engine_of(given) is given
    assert type(engine_of("direct")) is DirectEngine


@pytest.mark.parametrize("setting", ["false", "true", "cudagraph", "auto"])
def test_one_switch_makes_the_reference_run_everything(setting, monkeypatch):
    network, policy = q_network(0), actor_critic()
    for unset in ("auto", ""):
        monkeypatch.setenv("STEADYRL_ENGINE", unset)
        assert None not in (q_on_host(network), policy_on_host(policy), value_on_host(policy))
    monkeypatch.setenv("STEADYRL_ENGINE", "eager")
    engine = engine_of(compile_mode(setting, CPU, 10**9))
    assert type(engine) is EagerEngine
    assert {engine.policy(each) for each in (network, policy)} == {None}
    assert engine.collector(pytest.fail) is None
    assert engine.evaluator(torch.relu, learner("direct").network, Stop) is None
    assert {q_on_host(network), policy_on_host(policy), value_on_host(policy)} == {None}


@pytest.mark.parametrize("mode", ["direct", "compiled", "cudagraph"])
def test_other_engines_act_in_machine_code_where_that_is_faster(mode, monkeypatch):
    monkeypatch.delenv("STEADYRL_ENGINE", raising=False)
    engine, network, policy = engine_of(mode), q_network(0), actor_critic()
    random = torch.Generator().manual_seed(0)
    policy.reset_parameters(random)
    obs = torch.randn(5, 4, generator=random)
    with torch.no_grad():
        actions = network(obs).argmax(1).tolist()
        parameters = policy.policy_params(obs)
    assert engine.policy(network)(obs.numpy()).argmax(1).tolist() == actions
    found = torch.as_tensor(engine.policy(policy)(obs.numpy()))
    torch.testing.assert_close(found, parameters, rtol=1e-5, atol=1e-5)
    assert engine.policy(torch.nn.Linear(3, 3)) is None
    assert engine.collector(lambda: 5) == 5 and engine.collector(lambda: None) is None
    assert engine.captures is (mode == "cudagraph")


def actor_critic():
    return ActorCritic(
        (4,), "float32", build_head(DiscreteActions(2), CPU, scaled=True), hidden=(8,), shared=None,
        normalise=False, log_std=0.0, network=PLAIN, masks=None, popart=False,
    )  # fmt: skip


def test_a_switch_that_is_unknown_is_refused(monkeypatch):
    monkeypatch.setenv("STEADYRL_ENGINE", "fast")
    with pytest.raises(SettingError, match=r"STEADYRL_ENGINE.*must be eager"):
        compile_mode("auto", CPU, 1)


@pytest.mark.parametrize("agent", ["dqn", "ppo"])
def test_a_run_by_the_reference_alone_asks_for_no_private_name(agent, tmp_path, monkeypatch):
    monkeypatch.setenv("STEADYRL_ENGINE", "eager")
    for name in ("offers", "require", "_find"):
        monkeypatch.setattr(TORCH, name, pytest.fail)
    run_small(tmp_path, agent, **{"agent.compile": "true"})
