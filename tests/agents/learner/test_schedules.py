"""Schedules: closed forms, contradictions in the configuration, and their use in updates."""

import math
import re
from dataclasses import is_dataclass
from itertools import pairwise
from typing import get_args, get_type_hints

import numpy as np
import pytest
from algorithms import small
from changed import changed
from hypothesis import given
from hypothesis import strategies as st
from ppo_agents import SETTINGS as PPO_SETTINGS
from ppo_agents import Episodes, collect, learn
from ppo_agents import build as build_ppo

from steadyrl.agents.dqn.fused import CURVES, epsilon_at
from steadyrl.agents.learner.schedules import Schedule, over_the_run
from steadyrl.agents.registry import ALGORITHMS, settings_type
from steadyrl.core.errors import SettingError
from tests.agents.dqn.test_agent import SETTINGS as DQN_SETTINGS
from tests.agents.dqn.test_agent import build as build_dqn

TOTAL = 1000
EPSILONS = ("start", "end", "steps", "warmup", "delay")  # as the fused rollout reads them
HALF_COSINE = (1 + math.cos(math.pi / 2)) / 2


@pytest.mark.parametrize(
    ("anneal", "values"),
    [
        # At 0, 50, 100, 325, 550, 1000 and 2000 of 1000 steps, with a warm-up of 100.
        ("constant", [0, 1, 2, 2, 2, 2, 2]),
        ("linear", [0, 1, 2, 1.625, 1.25, 0.5, 0.5]),
        ("cosine", [0, 1, 2, 0.5 + 0.75 * (1 + math.sqrt(0.5)), 1.25, 0.5, 0.5]),
    ],
)
def test_schedule_shapes_in_closed_form(anneal, values):
    schedule = over_the_run(anneal, 2.0, 0.5, 0.1, TOTAL)
    found = [schedule.at(now) for now in (0, 50, 100, 325, 550, 1000, 2000)]
    assert found == pytest.approx(values, abs=1e-12)
    without = over_the_run(anneal, 2.0, 0.5, 0.0, TOTAL)
    assert without.at(0) == 2.0
    assert without.at(500) == pytest.approx(2.0 if values[-1] == 2 else 1.25)
    later = schedule._replace(delay=100)
    assert [later.at(now) for now in (0, 50, 100, 150, 199, 200)] == [0, 1, 2, 2, 2, 2]
    assert later.at(425) == schedule.at(325)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 0.9),
    st.integers(1, 10_000),
)
def test_schedules_are_monotone_and_bounded(shape, start, end, warmup, total):
    schedule = over_the_run(shape, start, end, warmup, total)
    values = [schedule.at(round(fraction * total)) for fraction in np.linspace(0, 1.2, 61)]
    assert all(0 <= value <= max(start, end) * (1 + 1e-9) for value in values)
    after = [
        v
        for i, v in enumerate(values)
        if round(np.linspace(0, 1.2, 61)[i] * total) >= warmup * total
    ]
    sign = 1 if end >= start else -1
    assert all(sign * (b - a) >= -1e-9 for a, b in pairwise(after))
    assert values[-1] == (start if shape == "constant" else end)


def test_warm_up_counts_the_steps_ahead():
    schedule = Schedule(1.0, 0.0, "linear", 50, warmup=50)
    assert [schedule.at(now, ahead=10) for now in (0, 10, 40, 45, 50)] == [0.2, 0.4, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"anneal_learning_rate": "constant", "learning_rate_end": 1e-4}, "e=constant: make that"),
        ({"learning_rate_warmup": 1.0}, "must be below 1"),
        ({"learning_rate_warmup": -0.1}, "between 0 and 1"),
        ({"learning_rate_end": -1.0}, "0 or more"),
        ({"learning_rate_end": 1e4}, "at most 1,000"),
    ],
)
@pytest.mark.parametrize("settings", [DQN_SETTINGS, PPO_SETTINGS], ids=["dqn", "ppo"])
def test_contradictory_learning_rate_schedules_are_rejected(settings, changes, reason):
    with pytest.raises(SettingError, match=reason):
        changed(settings, **changes)


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        (
            PPO_SETTINGS,
            {"clip_end": 0.1},
            "clip_end=0.1: is never reached with agent.anneal_clip=c",
        ),
        (PPO_SETTINGS, {"entropy_coef_end": 0.1}, "agent.anneal_entropy_coef=constant"),
        (PPO_SETTINGS, {"clip_warmup": 2.0}, "clip_warmup=2.0: must be between 0 and 1"),
        (DQN_SETTINGS, {"anneal_epsilon": "constant"}, "epsilon_end=0.1: is never reached from"),
        (DQN_SETTINGS, {"epsilon_delay": 0.6}, "epsilon_fraction=0.5 more are beyond"),
        (DQN_SETTINGS, {"epsilon_warmup": 0.6}, "epsilon_warmup=0.6: epsilon_fraction=0.5 more"),
        (DQN_SETTINGS, {"epsilon_warmup": 1.5}, "between 0 and 1"),
        (DQN_SETTINGS, {"epsilon_delay": -1.0}, "between 0 and 1"),
        (DQN_SETTINGS, {"replay__anneal_beta": "constant"}, "beta_end=1.0: is never reached from"),
        (DQN_SETTINGS, {"replay__beta_warmup": 1.0}, "must be below 1"),
    ],
)
def test_contradictory_schedules_of_one_algorithm_are_rejected(settings, changes, reason):
    with pytest.raises(SettingError, match=reason):
        changed(settings, **changes)


def test_parts_of_the_run_that_add_up_to_all_of_it_are_accepted():
    parts = {"epsilon_warmup": 0.34, "epsilon_delay": 0.56, "epsilon_fraction": 0.1}
    assert sum(parts.values()) > 1  # by rounding
    changed(DQN_SETTINGS, **parts)


def test_epsilon_holds_and_then_anneals():
    options = {"anneal_epsilon": "cosine", "epsilon_delay": 0.2, "epsilon_fraction": 0.5}
    agent = build_dqn(total=TOTAL, **options)
    found = []
    for agent._clock.steps in (0, 200, 450, 700, 1000):
        found.append(agent.scalars()["train/epsilon"])
    assert found == pytest.approx([1.0, 1.0, 0.55, 0.1, 0.1])
    constant = build_dqn(anneal_epsilon="constant", epsilon_start=0.3, epsilon_end=0.3, total=TOTAL)
    constant._clock.steps = 999
    assert constant.scalars()["train/epsilon"] == 0.3


@pytest.mark.parametrize("anneal", ["linear", "cosine"])
def test_epsilon_jumps_to_its_end_after_the_delay(anneal):
    options = {"anneal_epsilon": anneal, "epsilon_delay": 0.4, "epsilon_fraction": 0.0}
    schedule = build_dqn(total=TOTAL, **options)._epsilon
    steps = (0, 200, 399, 400, 1000)
    assert [schedule.at(now) for now in steps] == [1.0, 1.0, 1.0, 0.1, 0.1]
    arrays = np.array([getattr(schedule, name) for name in EPSILONS])
    fused = [epsilon_at(CURVES[anneal], arrays, now) for now in steps]
    assert fused == [1.0, 1.0, 1.0, 0.1, 0.1]


def test_beta_follows_its_schedule():
    options = {"beta_start": 0.5, "beta_end": 0.9, "anneal_beta": "cosine", "beta_warmup": 0.2}
    beta = build_dqn(total=TOTAL, **options)._settings.betas(TOTAL)
    assert [beta.at(now) for now in (0, 100, 200, 600, 1000)] == pytest.approx(
        [0, 0.25, 0.5, 0.7, 0.9]
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_scheduled_number_has_start_end_anneal_and_warmup(name):
    """X or X_start, X_end, anneal_X and X_warmup: all of them where one of the last three is."""

    def walk(cls, path):
        hints = get_type_hints(cls)
        for key, hint in hints.items():
            if is_dataclass(hint):
                yield from walk(hint, f"{path}{key}.")
            number = re.fullmatch(r"(.+)_(?:end|warmup|start)|anneal_(.+)", key)
            if not number or key == "learning_starts":
                continue
            x = number[1] or number[2]
            starts = {x, f"{x}_start"} & set(hints)
            assert len(starts) == 1, path + x
            assert get_args(hints[f"anneal_{x}"]) == ("constant", "linear", "cosine")
            assert hints[f"{x}_end"] is hints[f"{x}_warmup"] is float
            yield path + x

    found = set(walk(settings_type(name), ""))
    assert found == {"learning_rate", *small(name).scheduled}, "see `scheduled` in its small.py"


def test_dqn_learning_rate_is_scheduled_and_stays_positive():
    options = {"anneal_learning_rate": "cosine", "learning_rate_end": 2e-4}
    agent = build_dqn(total=TOTAL, train_every=100, learning_rate_warmup=0.2, **options)
    found = {}
    clock, schedule = agent._clock, agent._rate
    for clock.steps in (100, 200, 600, 900, 1000):
        found[clock.steps] = clock.rate(schedule) * 1e4
    last = 2 + 8 * (1 + math.cos(math.pi * 700 / 800)) / 2
    assert found == pytest.approx({100: 5, 200: 10, 600: 6, 900: last, 1000: last})


@pytest.mark.parametrize(("anneal", "warmup"), [("linear", 0.0), ("cosine", 0.3)])
def test_ppo_schedules_start_at_full_value_and_stay_positive(anneal, warmup):
    """As in Huang et al. (2022), detail 4, for all three scheduled numbers."""
    rollouts, samples = 10, 48
    names = ("learning_rate", "clip", "entropy_coef")
    changes = {f"anneal_{name}": anneal for name in names}
    changes |= {f"{name}_warmup": warmup for name in names}
    agent = build_ppo(total=rollouts * samples, **changes)
    passed, step = [], agent._learner.step
    agent._learner.step = lambda batch, *numbers: (passed.append(numbers), step(batch, *numbers))
    env = Episodes(mean_length=1e9)
    learn(agent, env, env.reset(), rollouts)
    assert len(passed) == rollouts * 2 * 4
    found = np.array(passed[::8]) / (1e-3, 0.2, 0.01)  # [rollout, number], of its start
    rising = [(k + 1) / 3 for k in range(3)] if warmup else []
    fractions = [k / (10 - len(rising)) for k in range(10 - len(rising))]
    falling = [1 - s if anneal == "linear" else (1 + math.cos(math.pi * s)) / 2 for s in fractions]
    np.testing.assert_allclose(found, np.array([[*rising, *falling]] * 3).T, rtol=1e-9)
    assert (found > 0).all()


def test_extended_runs_anneal_over_the_new_length():
    short = build_ppo(total=480, anneal_clip="cosine")
    env = Episodes(mean_length=1e9)
    collect(short, env, env.reset(), 16)
    short.update()
    longer = build_ppo(total=960, anneal_clip="cosine")
    longer.load_state_dict(short.state_dict())
    assert short.clip == pytest.approx(0.1 * (1 + math.cos(math.pi * 48 / 480)))
    assert longer.clip == pytest.approx(0.1 * (1 + math.cos(math.pi * 48 / 960)))
    assert longer.learning_rate == pytest.approx(1e-3 * (1 - 48 / 960))
