"""The learning rate that follows the KL divergence, against a naive twin of rsl_rl's rule."""

import numpy as np
import pytest
import torch
from changed import changed
from forked_ranks import together
from ppo_agents import SETTINGS, Episodes, build, collect, learn

from steadyrl.agents.learner.interrupt import Stop
from steadyrl.agents.ppo.kl_learning_rate import KLLearningRate
from steadyrl.core.errors import SettingError
from tests.agents.learner.test_learner import as_traced
from tests.agents.ppo.test_agent import UntilRewarded, same, spy, state_of

KL = {
    "adapt_learning_rate": "kl",
    "anneal_learning_rate": "constant",
    "target_kl": 1e-3,
    "learning_rate": 2e-3,
    "epochs": 3,
}


def twin(rate, kl, desired):
    """Return the next rate as rsl_rl's PPO.update computes it."""
    if kl > desired * 2.0:
        return max(1e-5, rate / 1.5)
    if kl < desired / 2.0 and kl > 0.0:
        return min(1e-2, rate * 1.5)
    return rate


@pytest.mark.parametrize("target", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_every_step_has_the_rate_of_the_twin(target, recurrent):
    agent = build(**KL | {"target_kl": target}, recurrent__cell=recurrent)
    seen, env, rate, changes = spy(agent), Episodes(), 2e-3, set()
    obs = env.reset()
    for _ in range(4):
        seen.clear()
        assert agent.scalars()["train/learning_rate"] == pytest.approx(rate)
        _, obs = learn(agent, env, obs, 1)
        assert len(seen) == 12, "the target ends no epochs"
        for n, (_, metrics, numbers) in enumerate(seen):
            assert numbers[0] == pytest.approx(rate)
            # The first minibatch sees the policy that acted: its divergence is rounding.
            now = twin(rate, metrics["train/approx_kl"], target) if n else rate
            changes.add(np.sign(now - rate))
            rate = now
    assert changes != {0}
    assert agent.learning_rate == pytest.approx(rate)


def test_the_rate_stays_within_its_bounds():
    agent = build(**KL | {"target_kl": 0.01})
    (rate,) = agent._extensions
    assert isinstance(rate, KLLearningRate)

    def after(kl):
        agent._learner.watched = kl
        found = rate.after_step(0.5)
        assert found == agent.learning_rate
        return found

    assert after(1.0) == 2e-3  # a rollout's first minibatch changes nothing
    for kl, end in ((1.0, 1e-5), (1e-9, 1e-2), (np.inf, 1e-5)):
        for _ in range(40):
            found = after(kl)
        assert found == end
    for kl in (0.01, 0.0, -1e-9, np.nan, 0.02, 0.005):  # at the target, none, rounding, its bounds
        assert after(kl) == 1e-5


@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_the_rate_stays_until_there_is_something_to_learn(coef):
    agent, env = build(total=240, **KL, rnd__coef=coef, rnd__fraction=0.5), UntilRewarded()
    seen, obs, changing = spy(agent), env.reset(), []
    for _ in range(8):
        seen.clear()
        before = agent.learning_rate
        _, obs = learn(agent, env, obs, 1)
        changing.append({before} != {numbers[0] for _, _, numbers in seen})
    # RND gives no advantages in the first rollout, nor after its fraction of the run.
    assert not changing[0] and not any(changing[-3:]) and any(changing) == (coef > 0)
    constant = agent.learning_rate
    env.rewarded = True
    learn(agent, env, obs, 4)
    assert agent.learning_rate != constant


def test_without_it_the_rate_is_of_the_schedule():
    agent = build()
    seen, env = spy(agent), Episodes()
    learn(agent, env, env.reset(), 2)
    first, second = {numbers[0] for _, _, numbers in seen[:8]}, {n[0] for _, _, n in seen[8:]}
    assert first == {1e-3} and second < {agent.learning_rate, *second}
    assert len(second) == 1 and "kl_rate" not in agent.state_dict()


def test_rnd_learns_at_the_current_rate():
    agent, env, rates = build(**KL, rnd__coef=0.5), Episodes(), []
    learner = agent._extensions[0]._rnd.learner
    step, obs = learner.step, env.reset()

    def record(batch, rate):
        rates.append(rate)
        return step(batch, rate)

    learner.step = record
    for updates in range(4):
        rates.clear()
        _, obs = learn(agent, env, obs, 1)
        assert rates == [agent.learning_rate] * (4 if updates else 0)
    assert agent.learning_rate != KL["learning_rate"]


def agent_in(mode, envs=3, **changes):
    """Return an agent whose updates run eagerly, compiled, or as the graphs that are compiled."""
    compiled = "false" if mode == "eager" else "true"
    agent = build(envs, compile=compiled, **KL | changes)
    return as_traced_agent(agent) if mode == "traced" else agent


def as_traced_agent(agent):
    as_traced(agent._learner)
    agent._targets.evaluator._graph = agent._targets.evaluator.value = None
    return agent


def learned(agent, updates=6):
    """Return the rate of every step, each update's metrics, and the weights."""
    rates, step, env = [], agent._learner.step, Episodes(mean_length=1e9)

    def record(batch, rate, *scalars):
        rates.append(rate)
        return step(batch, rate, *scalars)

    agent._learner.step = record
    metrics, _ = learn(agent, env, env.reset(), updates)
    return rates, metrics, agent._learner.network.weights


MODES = [
    pytest.param("traced", marks=pytest.mark.machinery),
    pytest.param("compiled", marks=[pytest.mark.machinery, pytest.mark.slow]),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "changes",
    [
        {"minibatches": 5, "grad_accumulation": 2},
        {"recurrent__cell": "gru", "optimizer__name": "muon", "hidden": (16, 16)},
    ],
)
def test_compiled_updates_have_the_rates_of_eager_ones(mode, changes, caplog):
    rates, metrics, weights = learned(agent_in("eager", **changes))
    found, its_metrics, its_weights = learned(agent_in(mode, **changes))
    assert found == rates and len(set(rates)) > 2
    torch.testing.assert_close(its_weights, weights, rtol=1e-4, atol=1e-5)
    for one, other in zip(its_metrics, metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    assert "running eagerly" not in caplog.text


@pytest.mark.parametrize("mode", ["eager", *MODES])
def test_an_interrupted_update_restores_the_rate(mode):
    straight, stopped = agent_in(mode), agent_in(mode)
    envs = [Episodes(), Episodes()]
    for agent, env in zip((straight, stopped), envs, strict=True):
        _, obs = learn(agent, env, env.reset(), 1)
        collect(agent, env, obs, 16)
    before, stop, steps = state_of(stopped), Stop(), []
    stopped.set_stop_flag(stop)
    step = stopped._learner.train_step

    def stopping(*inputs):
        steps.append(stopped.learning_rate)
        if len(steps) == 9:
            stop.request()
        return step(*inputs)

    stopped._learner.train_step = stopping
    assert stopped.update() is None
    assert len(set(steps)) > 1, "the rate had changed"
    after = stopped.state_dict()
    for key in ("learner", "kl_rate", "shuffling"):
        assert same(after[key], before[key]), key
    resumed = agent_in(mode)
    resumed.load_state_dict(before)
    for agent in (straight, resumed):
        agent.update()
    assert same(straight.state_dict(), resumed.state_dict())


def of_rank(comm, updates, mode):
    agent = agent_in(mode.replace("traced", "compiled"), seed=comm.rank)
    agent.attach_comm(comm)
    if mode == "traced":
        as_traced_agent(agent)
    env, rates = Episodes(3, seed=comm.rank), []
    obs = env.reset()
    for _ in range(updates * 16):
        decision = agent.actor(3, explore=True).act(obs, np.zeros(3, bool))
        step = env.step()
        comm.sync_counts(int(step.valid.sum()), (), now=agent.syncs_this_step)
        agent.observe(decision, step)
        agent.update()
        rates.append(agent.learning_rate)
        obs = step.obs
    return rates, agent._learner.network.weights.detach().numpy()


def test_ranks_have_one_rate():
    (one, weights), (other, other_weights) = together(2, of_rank, 4, "eager")
    assert one == other and len(set(one)) > 1
    np.testing.assert_array_equal(weights, other_weights)


@pytest.mark.parametrize("mode", MODES)
def test_compiled_ranks_have_the_rates_of_eager_ones(mode):
    (one, weights), (other, other_weights) = together(2, of_rank, 4, mode)
    (rates, expected), _ = together(2, of_rank, 4, "eager")
    assert one == other == rates and len(set(one)) > 1
    np.testing.assert_array_equal(weights, other_weights)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rate", [1e-6, 0.1, float("nan")])
def test_rates_out_of_bounds_are_refused(rate):
    agent = build(**KL)
    state = agent.state_dict()
    state["kl_rate"] = torch.tensor(rate, dtype=torch.float64)
    with pytest.raises(ValueError, match="rate"):
        agent.load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_kl": None}, "adapt_learning_rate=kl: needs agent.target_kl"),
        ({"anneal_learning_rate": "linear"}, "adapt_learning_rate=kl: is instead of a schedule"),
        ({"learning_rate_warmup": 0.1}, "add agent.anneal_learning_rate=constant and agent.learn"),
        ({"learning_rate": 0.1}, "learning_rate=0.1: must be 1e-05 to 0.01 with agent.adapt"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes, said):
    with pytest.raises(SettingError, match=said):
        changed(SETTINGS, **KL | changes)
