"""Device work per act, step and update, compared with the table of docs/measuring.md.

The accelerator is the fake `Card`, which has no data: reading a number, or a tensor on the wrong
device, fails the test. CUDA graphs are captured by its rules.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from card import META, Asked, Card
from ppo_agents import SETTINGS as PPO_SETTINGS
from ppo_agents import Episodes, act

from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.engine import choice
from steadyrl.agents.engine.cpu import host_weights as mirror
from steadyrl.agents.ppo.agent import PPO
from steadyrl.buffers.replay import build as replay_build
from steadyrl.core import cuda_graph as recording
from steadyrl.core.cuda_graph import CudaGraphed
from steadyrl.envs.types import DiscreteActions, EnvSpec, Step
from tests.agents.dqn.test_agent import SETTINGS as DQN_SETTINGS

PAGE = Path(__file__).parents[3] / "docs" / "measuring.md"
ENVS = 3
VECTOR = EnvSpec("Vectors", ENVS, (4,), "float32", 1, DiscreteActions(3))
IMAGE = EnvSpec("Pictures", ENVS, (4, 84, 84), "uint8", 4, DiscreteActions(3))
SPECS = {"vector": VECTOR, "image": IMAGE}


# Uncompiled operations on images are slow, and differ from vectors in the layers only.
WAYS = pytest.mark.parametrize(
    ("seen", "mode"),
    [
        ("vector", "direct"),
        ("vector", "cudagraph"),
        ("image", "cudagraph"),
        pytest.param("image", "direct", marks=pytest.mark.slow),
    ],
)


class Budget(NamedTuple):
    """A row of the table."""

    what: str
    launches: int
    there: int
    back: int
    waits: int


def budgets():
    heading = "\n## Launches, copies and synchronisations\n"
    text = PAGE.read_text().partition(heading)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    return {what: Budget(what, *map(int, numbers)) for what, *numbers in rows}


class Pictures(Episodes):
    """The same episodes, with images."""

    def reset(self):
        return self.random.integers(0, 256, self.shape, np.uint8)


@pytest.fixture
def card(monkeypatch, caplog):
    """Simulate a device that can capture graphs."""
    caplog.set_level(logging.WARNING, "steadyrl")
    found = Card()
    monkeypatch.setattr(recording, "capture", found.record)
    monkeypatch.setattr(recording, "on_side_stream", lambda function: function())
    yield found
    assert [r.getMessage() for r in caplog.records if "recorded" in r.getMessage()] == []


def choose(monkeypatch, *, acting="device", home="host", mode="direct"):
    monkeypatch.setattr(mirror, "is_faster_on_host", lambda *_, **__: acting == "host")
    monkeypatch.setattr(choice, "compile_mode", lambda *_, **__: mode)
    where = META if home == "device" else None
    monkeypatch.setattr(replay_build, "choose_accelerator", lambda *_: where)


def check(measured: dict[str, Asked], card: Card) -> None:
    """Compare counts with the table; fewer are allowed."""
    known = budgets()
    for what, counted in measured.items():
        assert what in known, what
        budget = known[what]
        counts = (counted.launches, counted.there, counted.back, len(counted.waits))
        assert all(a <= b for a, b in zip(counts, budget[1:], strict=True)), (budget, counted, card)


def dqn(spec, **changes):
    settings = replace(
        DQN_SETTINGS,
        hidden=(8, 8),
        learning_starts=0,
        train_every=ENVS,
        updates_per_train=1,
        target_every=10**9,
        batch_size=4,
        replay=replace(DQN_SETTINGS.replay, capacity=64, **changes),
    )
    return DQN(settings, spec, device=META, seed=0, total_steps=10_000)


def environment(spec):
    return (Pictures if spec is IMAGE else Episodes)(ENVS, spec.observation_shape)


def one_row(agent, env: Episodes, obs) -> Step:
    decision = act(agent, obs)
    decision.env_action.numpy(force=True)  # as the loop sends actions
    step = env.step()
    agent.observe(decision, step)
    return step


@WAYS
@pytest.mark.parametrize("home", ["host", "device"])
@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "priorities"])
def test_dqn_stays_within_its_device_budget(card, monkeypatch, prioritized, home, seen, mode):
    acting = "host" if seen == "vector" else "device"
    choose(monkeypatch, acting=acting, home=home, mode=mode)
    spec = SPECS[seen]
    env = environment(spec)
    with card:
        agent, obs = dqn(spec, prioritized=prioritized), env.reset()
        for _ in range(8 if mode == "cudagraph" else 3):
            obs = one_row(agent, env, obs).obs
            agent.update()
        obs = one_row(agent, env, obs).obs
        card.take()
        alive = dict(card.alive)
        agent.update()
        learned = card.take()
        act(agent, obs).env_action.numpy(force=True)
        first = card.take()
        acted = act(agent, obs)
        acted.env_action.numpy(force=True)
        decided = card.take()
        agent.observe(acted, env.step())
        stored = card.take()
        agent.update()
        assert len(card.alive) == len(alive), "something outlives its update"
        assert agent.updates > (CudaGraphed.WARM_UP if mode == "cudagraph" else 0)
    graph = f", {mode}" if acting == "device" else ""
    kind = "priorities" if prioritized else "uniform"
    place = f"replay on the {home}"
    storing = f"{place}, {kind}" + (f", {mode}" if home == "device" else "")
    check(
        {
            f"DQN, acting on the {acting}{graph}": decided,
            f"DQN, acting on the {acting}{graph}, first after an update": first,
            f"DQN, storing a timestep, {storing}": stored,
            f"DQN, an update, {seen}, {place}, {kind}, {mode}": learned,
        },
        card,
    )


@WAYS
def test_ppo_stays_within_its_device_budget(card, monkeypatch, seen, mode):
    acting = "host" if seen == "vector" else "device"
    choose(monkeypatch, acting=acting, mode=mode)
    spec = SPECS[seen]
    env = environment(spec)
    settings = replace(PPO_SETTINGS, hidden=(8, 8), rollout_steps=4, epochs=2, minibatches=4)
    with card:
        agent, obs = PPO(settings, spec, device=META, seed=0, total_steps=10_000), env.reset()
        steps, learner = [], agent._learner
        step = learner.step

        def one_step(*args):
            card.take()
            step(*args)
            steps.append(card.take())

        for _ in range(4):
            obs = one_row(agent, env, obs).obs
        agent.update()
        for _ in range(3):
            obs = one_row(agent, env, obs).obs
        card.take()
        decision = act(agent, obs)
        decision.env_action.numpy(force=True)
        decided = card.take()
        row = env.step()
        agent.observe(decision, row)
        stored = card.take()
        agent.update()
        update_cost = card.take()
        act(agent, row.obs).env_action.numpy(force=True)
        first = card.take()
        for _ in range(4):
            row = one_row(agent, env, row.obs)
        learner.step = one_step
        agent.update()
    graph = f", {mode}" if acting == "device" else ""
    check(
        {
            f"PPO, acting on the {acting}{graph}": decided,
            f"PPO, acting on the {acting}{graph}, first after an update": first,
            f"PPO, storing a timestep decided on the {acting}": stored,
            f"PPO, a step on a minibatch, {seen}, {mode}": steps[-1],
            f"PPO, an update of 8 minibatches, {seen}, {mode}": update_cost,
        },
        card,
    )


@pytest.mark.parametrize("mode", ["direct", "cudagraph"])
def test_a_minibatch_of_ppo_leaves_no_tensors_on_the_device(card, monkeypatch, mode):
    choose(monkeypatch, mode=mode)
    env = Episodes(ENVS, (4,))
    with card:
        settings = replace(PPO_SETTINGS, rollout_steps=4)
        agent = PPO(settings, VECTOR, device=META, seed=0, total_steps=10_000)
        learner, obs, alive = agent._learner, env.reset(), []
        step = learner.step

        def counted(*args):
            step(*args)
            alive.append(len(card.alive))

        learner.step = counted
        for _ in range(3):
            for _ in range(4):
                obs = one_row(agent, env, obs).obs
            agent.update()
    later = alive[len(alive) // 3 :]
    assert len(set(later)) == 1, later
