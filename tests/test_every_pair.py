"""Every allowed pair of options trains, and resumes after a kill to the same result.

The cases are a pairwise covering array. Two per algorithm run here in this process, all of
them, killed and resumed, in the slow tests.
"""

from itertools import combinations

import pytest
from algorithms import NAMES, known, small
from command import ROOT
from covering import covering, pairs_of
from logged_runs import uninterrupted_and_resumed
from opened import job

from steadyrl.agents.registry import settings_type
from steadyrl.core.errors import ExpectedError
from tests.test_killed import compare_killed_with_uninterrupted

# {option: {value: overrides}}; with any values of others, one value of an option is allowed. These
# are for every algorithm that has the keys; algorithms add their own.
COMMON = {
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
        "student acts": ("agent.teacher.policy=pole_teacher:Anywhere",),
        "teacher acts": ("agent.teacher.policy=pole_teacher:Anywhere", "agent.teacher.acts=0.6"),
    },
    "grad_accumulation": {"1": (), "2": ("agent.grad_accumulation=2",)},
    "layer_norm": {
        "off": ("agent.network.layer_norm=false",),
        "on": ("agent.network.layer_norm=true",),
    },
    "precision": {"float32": (), "bf16": ("precision=bf16",)},
    "deterministic": {"off": (), "on": ("deterministic=true",)},
    "optimizer": {
        "adam": (),
        "adamw": ("agent.optimizer.name=adamw", "agent.optimizer.weight_decay=0.1"),
        "radam": ("agent.optimizer.name=radam",),
        "muon": ("agent.optimizer.name=muon", "agent.hidden=[16,16]"),
    },
    "learning_rate": {
        "constant": ("agent.anneal_learning_rate=constant",),
        "cosine": ("agent.anneal_learning_rate=cosine",),
    },
}


MASKED = ("masked", "masked pixels")
FORBIDDEN_FOR_ALL = tuple((("env", env), ("backend", "kernel")) for env in MASKED)


def supports(name, option, value):
    """Return whether an algorithm has the keys of a common option, and supports masks if needed."""
    if option == "env" and value in MASKED:
        return getattr(settings_type(name), "takes_masks", False)
    agents = [text for text in COMMON[option][value] if text.startswith("agent.")]
    return known(name, *agents) == tuple(agents)


def options_of(name):
    """Return {option: {value: overrides}} of an algorithm: common ones and its own."""
    found = {
        option: {
            value: overrides_of
            for value, overrides_of in values.items()
            if supports(name, option, value)
        }
        for option, values in COMMON.items()
    }
    for option, values in small(name).switches.items():
        found[option] = found.get(option, {}) | dict(values)
    return {option: values for option, values in found.items() if len(values) > 1}


OPTIONS = {name: options_of(name) for name in NAMES}
FORBIDDEN = {
    name: [
        pair
        for pair in (*small(name).refused, *FORBIDDEN_FOR_ALL)
        if all(value in OPTIONS[name].get(option, {}) for option, value in pair)
    ]
    for name in NAMES
}
SMALL = ("env.num_envs=2", "env.max_restarts=0", "device=cpu")
CASES = {
    name: covering({k: list(values) for k, values in switches.items()}, FORBIDDEN[name])
    for name, switches in OPTIONS.items()
}


def overrides_of(name, case, compiled="false"):
    """Return the overrides of a case; missing options have their first value."""
    chosen = [values[case.get(k, next(iter(values)))] for k, values in OPTIONS[name].items()]
    overrides = [part for parts in chosen for part in parts]
    compiles = known(name, f"agent.compile={compiled}")
    return (f"agent={name}", *small(name).short, *SMALL, *overrides, *compiles)


def test_the_cases_cover_every_allowed_pair_and_no_forbidden_one():
    for name, switches in OPTIONS.items():
        items = [[(factor, value) for value in values] for factor, values in switches.items()]
        every = {
            frozenset((a, b)) for one, other in combinations(items, 2) for a in one for b in other
        }
        forbidden = {frozenset(pair) for pair in FORBIDDEN[name]}
        assert forbidden < every
        assert set().union(*map(pairs_of, CASES[name])) == every - forbidden
        assert len(CASES[name]) < 25


@pytest.mark.parametrize("name", NAMES)
def test_forbidden_pairs_are_rejected(tmp_path, name):
    for pair in FORBIDDEN[name]:
        with pytest.raises(ExpectedError) as refused:
            job(tmp_path, *overrides_of(name, dict(pair)), quick=False)
        assert refused.value.exit_code == 2, pair


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", [0, 1])
def test_a_resumed_case_equals_an_uninterrupted_one(tmp_path, name, index):
    case = CASES[name][index] | {"backend": "sync"}  # worker processes take seconds to start
    overrides = (*overrides_of(name, case), "total_steps=300", "eval.every=100", "log.every=100")
    run_job = job(tmp_path, *overrides, quick=False)
    run, second, whole, parts = uninterrupted_and_resumed(run_job, 170)
    assert parts == whole and run.summary.updates > 5
    assert second.summary.weights_sha256 == run.summary.weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("name", NAMES)
def test_killed_cases_resume_to_the_same_result(tmp_path, name, compiled):
    steps = ("total_steps=2000", "eval.every=900", "checkpoint.every=200", "log.every=300")
    failed = []
    for index, case in enumerate(CASES[name]):
        folder, overrides = tmp_path / str(index), (*overrides_of(name, case, compiled), *steps)
        folder.mkdir()
        try:
            compare_killed_with_uninterrupted(folder, overrides, kills=1)
            print(name, index, "the same")
        except AssertionError as error:
            failed.append(f"{case}\n{ROOT / 'train.py'} {' '.join(overrides)}\n{error}")
            print(name, index, "FAILED\n", failed[-1])
    assert not failed, "\n\n".join(failed)
