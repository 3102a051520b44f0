"""The jobs of a sweep are checked, recognised and named before the first one starts."""

import json

import pytest

from steadyrl.training.sweeps.identity import digest


@pytest.mark.parametrize(
    ("typed", "lines"),
    [
        (["seed=0,-1,1"], ["error: seed=-1: must be 0 or more (no job was started)"]),
        (
            ["agent.learning_rate=1e-3,abc,-1", "seed=0,1"],
            [
                "error: agent.learning_rate=abc: must be a number (no job was started)",
                "  agent.learning_rate=-1: must be above 0",
            ],
        ),
    ],
)
def test_wrong_values_are_refused_before_the_first_job(sweep, tmp_path, typed, lines):
    ran, code, printed = sweep({}, *typed)
    assert (ran, code) == ([], 2)
    assert printed.splitlines() == lines
    assert [path.name for path in (tmp_path / "all").rglob("config.yaml")] == []
    ran, code, _ = sweep({}, "seed=0,1")  # in the same directory
    assert (len(ran), code) == (2, 0)


def test_jobs_with_other_settings_have_other_directories(sweep, tmp_path):
    sweep({}, "seed=0", "total_steps=2000")
    ran, _, _ = sweep({}, "seed=0", "total_steps=3000")
    assert ran == [(0, None)]
    # Logging settings do not make another run.
    ran, _, _ = sweep({}, "seed=0", "total_steps=3000", "log.every=10")
    assert ran == []
    assert len([path for path in (tmp_path / "all").iterdir() if path.is_dir()]) == 3


def test_any_swept_key_distinguishes_jobs(sweep, tmp_path):
    overrides = ("precision=float32,bf16", "agent.compile=false")
    ran, code, printed = sweep({}, *overrides)
    assert (len(ran), code) == (2, 0) and "job 2/2: precision=bf16" in printed
    assert sweep({}, *overrides)[0] == []


def test_jobs_sharing_a_directory_are_rejected_at_the_start(sweep, tmp_path):
    ran, code, printed = sweep({}, "seed=0,1", "run_dir=same")
    assert (ran, code) == ([], 2)
    assert "same: would be shared by two jobs, seed=0 and seed=1; leave it out" in printed


def test_a_new_job_does_not_take_the_run_of_another_for_its_own(sweep, tmp_path):
    where = "run_dir=runs/${seed}"
    assert len(sweep({}, "seed=0,1", "agent=dqn", where)[0]) == 2
    other = ("seed=0,1", "agent=ppo", where, "hydra.sweep.dir=other")
    ran, code, printed = sweep({}, *other)
    assert (ran, code) == ([], 2)
    assert (
        "runs/0: holds a run already; choose another directory, or continue it: resume=auto"
        in printed
    )
    assert sweep({}, *other, "resume=auto")[0] == [(0, "auto"), (1, "auto")]


def stored_jobs(tmp_path):
    return {path: json.loads(path.read_text()) for path in (tmp_path / "all/.jobs").glob("*.json")}


def test_another_notation_of_a_number_is_the_same_job(sweep, tmp_path):
    sweep({}, "seed=0,1", "total_steps=100000", "agent.learning_rate=0.001")
    assert sweep({}, "seed=0,1", "total_steps=1e5", "agent.learning_rate=1e-3")[:2] == ([], 0)


def test_new_configuration_keys_keep_the_identity_of_jobs(sweep, tmp_path):
    typed = ("seed=0,1", "precision=float32,bf16")
    sweep({}, *typed)
    for path, job in stored_jobs(tmp_path).items():  # as written by a version with fewer keys
        for key in ("agent.replay.beta_end", "env.step_timeout", "agent.noisy.enabled"):
            job["counted"].pop(key, None)
        path.write_text(json.dumps({**job, "identity": digest(job["counted"])}))
    assert sweep({}, *typed)[:2] == ([], 0)
    ran, code, _ = sweep({}, *typed, "agent.noisy.enabled=true")  # another run
    assert (len(ran), code) == (4, 0)
