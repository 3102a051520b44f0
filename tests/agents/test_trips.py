"""Locality: the number of files that a call passes through, and of changes between files."""

import gc
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from ppo_agents import Episodes, act, collect
from ppo_agents import build as build_ppo

from tests.agents.dqn.test_agent import Chain
from tests.agents.dqn.test_agent import build as build_dqn

ROOT = str(Path(__file__).parents[2] / "steadyrl") + "/"
# A virtual environment may lie within the checkout: its files are not ours.
LAYERS = ("agents/", "buffers/", "core/", "envs/", "memory/", "training/")


def trip(call, *arguments):
    """Return the project's files that a call enters, in order."""
    files = []

    def watch(frame, event, _):
        code = frame.f_code
        file = code.co_filename.removeprefix(ROOT)
        ours = file.startswith(LAYERS) and not code.co_name.startswith("<")
        if event == "call" and ours:
            files.append(file)

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # finalisers of other tests' objects would be counted
    sys.setprofile(watch)
    try:
        call(*arguments)
    finally:
        sys.setprofile(before)
        gc.enable()
    return files


def test_site_packages_within_the_checkout_are_not_counted():
    """Neither beside the package nor below it."""
    checkout = Path(__file__).parents[2]
    for file, ours in (
        ("steadyrl/agents/dqn/agent.py", ["agents/dqn/agent.py"]),
        (".venv/lib/python3/site-packages/torch/nn.py", []),
        ("env/agents/dqn.py", []),
        ("steadyrl/.venv/lib/python3/site-packages/torch/nn.py", []),
    ):
        made = {}
        exec(compile("def step(): pass", str(checkout / file), "exec"), made)
        assert trip(made["step"]) == ours


def changes(files):
    return sum(a != b for a, b in pairwise(files))


def test_dqn_steps_pass_through_few_files():
    agent = build_dqn(
        obs=6, prioritized=True, train_every=1, updates_per_train=1, learning_starts=10, n_step=3
    )
    env = Chain(1, [5], True)
    obs, stored, learned = env.reset(), [], []
    actor = agent.actor(1, explore=True)
    for _ in range(20):
        decision = actor.act(obs, np.zeros(1, dtype=bool))
        went = trip(agent.update)
        # Of the last step: the first one loads machine code.
        learned = went if "agents/learner/learner.py" in went else learned
        step = env.step()
        stored = trip(agent.observe, decision, step)
        obs = step.obs
    assert "agents/dqn/loss.py" in learned and "buffers/replay/host.py" in stored
    assert len(set(learned)) <= 11, learned
    assert changes(learned) <= 22, learned
    assert len(set(stored)) <= 4, stored


def test_ppo_updates_pass_through_few_files():
    agent = build_ppo(2, rollout_steps=8, minibatches=1, epochs=1)
    env = Episodes(2)
    obs = env.reset()
    for _ in range(2):  # the first update loads machine code
        decision, step = act(agent, collect(agent, env, obs, 7)), env.step()
        agent.observe(decision, step)
        learned, obs = trip(agent.update), step.obs
    assert "agents/learner/learner.py" in learned and "agents/ppo/loss.py" in learned
    assert len(set(learned)) <= 11, learned
    assert changes(learned) <= 34, learned
