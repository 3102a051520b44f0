"""Every pair of switches that is not refused trains, is killed, and ends as if it had not been.

The rows are a pairwise covering array. A handful of them runs here in this process, all of them,
killed and continued as processes, in the slow tests.
"""

from itertools import combinations

import pytest
from algorithms import NAMES, known, small
from command import ROOT
from covering import covering, pairs_of
from logged_runs import in_one_and_in_two_parts
from opened import job

from steadyrl.agents.registry import settings_type
from steadyrl.core.errors import ExpectedError
from tests.test_killed import hold_killed_against_whole

# Each switch with its values, and what is typed for them; the first goes with everything. These
# are for every algorithm that has their keys, which brings its own besides.
EVERY = {
    "env": {
        "vectors": ("env=cartpole",),
        "pixels": ("env=minatar_breakout",),
        "masked": ("env=cartpole", "env.id=masked_envs:Doors-v0", "+env.kwargs.doors=6"),
        "masked pixels": (
            "env=cartpole",
            "env.id=masked_envs:StampedMasks-v0",
            "+env.kwargs.kind=image",
        ),
    },
    "backend": {name: (f"env.backend={name}",) for name in ("sync", "async", "kernel")},
    "frame_stack": {"1": (), "2": ("env.frame_stack=2",)},
    "teacher": {
        "none": (),
        "looks on": ("agent.teacher.policy=pole_teacher:Anywhere",),
        "leads": ("agent.teacher.policy=pole_teacher:Anywhere", "agent.teacher.acts=0.6"),
    },
    "grad_accumulation": {"1": (), "2": ("agent.grad_accumulation=2",)},
    "layer_norm": {"off": (), "on": ("agent.network.layer_norm=true",)},
    "precision": {"float32": (), "bf16": ("precision=bf16",)},
    "deterministic": {"off": (), "on": ("deterministic=true",)},
    "learning_rate": {
        "stays": ("agent.anneal_learning_rate=constant",),
        "falls": ("agent.anneal_learning_rate=cosine",),
    },
}


MASKED = ("masked", "masked pixels")
REFUSED_OF_ALL = tuple((("env", env), ("backend", "kernel")) for env in MASKED)


def takes(name, switch, value):
    """Return whether an algorithm has the keys of a switch that is for all, and takes masks."""
    if switch == "env" and value in MASKED:
        return getattr(settings_type(name), "takes_masks", False)
    agents = [text for text in EVERY[switch][value] if text.startswith("agent.")]
    return known(name, *agents) == tuple(agents)


def switches_of(name):
    """Return {switch: {value: overrides}} of an algorithm: what all have, and its own."""
    found = {
        switch: {value: typed for value, typed in values.items() if takes(name, switch, value)}
        for switch, values in EVERY.items()
    }
    for switch, values in small(name).switches.items():
        found[switch] = found.get(switch, {}) | dict(values)
    return {switch: values for switch, values in found.items() if len(values) > 1}


SWITCHES = {name: switches_of(name) for name in NAMES}
REFUSED = {
    name: [
        pair
        for pair in (*small(name).refused, *REFUSED_OF_ALL)
        if all(value in SWITCHES[name].get(switch, {}) for switch, value in pair)
    ]
    for name in NAMES
}
SMALL = ("env.num_envs=2", "env.max_restarts=0", "device=cpu")
ROWS = {
    name: covering({k: list(values) for k, values in switches.items()}, REFUSED[name])
    for name, switches in SWITCHES.items()
}


def typed(name, row, compiled="false"):
    """Return the overrides of a row; what it says not is as in the first values."""
    chosen = [values[row.get(k, next(iter(values)))] for k, values in SWITCHES[name].items()]
    asked = [part for parts in chosen for part in parts]
    compiles = known(name, f"agent.compile={compiled}")
    return (f"agent={name}", *small(name).short, *SMALL, *asked, *compiles)


def test_every_pair_stands_in_a_row_of_few_and_no_forbidden_one_does():
    for name, switches in SWITCHES.items():
        items = [[(factor, value) for value in values] for factor, values in switches.items()]
        every = {
            frozenset((a, b)) for one, other in combinations(items, 2) for a in one for b in other
        }
        forbidden = {frozenset(pair) for pair in REFUSED[name]}
        assert forbidden < every
        assert set().union(*map(pairs_of, ROWS[name])) == every - forbidden
        assert len(ROWS[name]) < 25


@pytest.mark.parametrize("name", NAMES)
def test_what_no_row_holds_is_refused_by_the_program(tmp_path, name):
    for pair in REFUSED[name]:
        with pytest.raises(ExpectedError) as refused:
            job(tmp_path, *typed(name, dict(pair)), quick=False)
        assert refused.value.exit_code == 2, pair


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [0, 1])
def test_a_row_in_two_parts_is_the_same_as_in_one(tmp_path, name, place):
    row = ROWS[name][place] | {"backend": "sync"}  # processes take seconds to start
    asked = (*typed(name, row), "total_steps=300", "eval.every=100", "log.every=100")
    told = job(tmp_path, *asked, quick=False)
    run, second, whole, parts = in_one_and_in_two_parts(told, 170)
    assert parts == whole and run.summary.updates > 5
    assert second.summary.weights_sha256 == run.summary.weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("name", NAMES)
def test_kills_change_no_row(tmp_path, name, compiled):
    steps = ("total_steps=2000", "eval.every=900", "checkpoint.every=200", "log.every=300")
    failed = []
    for place, row in enumerate(ROWS[name]):
        folder, asked = tmp_path / str(place), (*typed(name, row, compiled), *steps)
        folder.mkdir()
        try:
            hold_killed_against_whole(folder, asked, kills=1)
            print(name, place, "the same")
        except AssertionError as error:
            failed.append(f"{row}\n{ROOT / 'train.py'} {' '.join(asked)}\n{error}")
            print(name, place, "FAILED\n", failed[-1])
    assert not failed, "\n\n".join(failed)
