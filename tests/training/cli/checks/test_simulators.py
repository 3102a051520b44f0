"""`scripts/envs.py check` of vector environments: one line for each fault."""

import pytest

from steadyrl.training.cli.checks import simulator_check
from steadyrl.training.cli.checks.envs import findings, settings_of
from steadyrl.training.cli.checks.isolated import FAULT, NOTE, OK, isolated


def found_by(check, name):
    """Return (level, text) of a check's findings."""
    settings = settings_of(f"checked_simulators:Simulator{name}-v0", ["env.num_envs=2"], None)
    return [(each.level, each.text) for each in isolated("here", check, settings, 60.0)]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Play few steps."""
    monkeypatch.setattr(simulator_check, "STEPS", 60)
    monkeypatch.setattr(simulator_check, "COMPARED", 30)


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (
            simulator_check.episodes,
            "12 random episodes of 9 steps, 108 in all, return 9 (from 9 to 9)",
        ),
        (simulator_check.determinism, "the same seed and actions give the same episodes"),
        (simulator_check.resume, "resumed runs continue exactly"),
    ],
)
def test_a_correct_simulator_has_no_faults(check, text):
    [(level, found)] = found_by(check, "Drift")
    assert level == OK and text in found


@pytest.mark.parametrize(
    ("name", "check", "level", "text"),
    [
        ("Unseeded", simulator_check.determinism, FAULT, "its obs differs at step 1 with the same"),
        ("Outside", simulator_check.episodes, NOTE, "6 of 61 batches of observations are outside"),
        ("Forgetful", simulator_check.resume, FAULT, "its terminated differs at step 4 after"),
        ("Opaque", simulator_check.resume, NOTE, "attribute engine is of type object"),
        ("Endless", simulator_check.episodes, NOTE, "no episode ended within 60 random steps"),
    ],
)
def test_each_fault_is_named(name, check, level, text):
    found = found_by(check, name)
    assert any(text in said for of, said in found if of == level), found


@pytest.mark.parametrize("typed", [[], ["env.backend=batch"]])
def test_a_simulator_is_checked_in_place_of_single_environments(typed):
    found = list(findings(settings_of("checked_simulators:SimulatorDrift-v0", typed, None)))
    names = list(dict.fromkeys(each.check for each in found))
    assert names[:5] == ["encoding", "episodes", "determinism", "resume", "backend"]
    assert FAULT not in {each.level for each in found}
