"""Which jobs of sweeps are the same run."""

from steadyrl.training.config.settings import completed
from steadyrl.training.sweeps.identity import counted, digest


def identity(values):
    return digest(counted(values))


def test_job_identity_uses_completed_settings():
    complete = completed({"agent": {"name": "ppo"}, "total_steps": "2e3"})
    partial_ = {**complete, "total_steps": 2000, "agent": {**complete["agent"]}}
    del partial_["agent"]["clip"], partial_["precision"]
    assert identity(complete) == identity(partial_)
    assert identity({**complete, "seed": 7}) != identity(complete)
