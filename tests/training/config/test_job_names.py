"""Names of the directories of a sweep's jobs."""

import glob
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from steadyrl.training.config.job_names import LONGEST, job_name


@pytest.mark.parametrize(
    ("job", "overrides", "typed", "name"),
    [
        (3, ["seed=1", "agent=ppo"], ["seed=0,1", "agent=dqn,ppo"], "agent-ppo__seed-1__job-3"),
        # Overrides common to all jobs are left out.
        (0, ["total_steps=20", "seed=0"], ["total_steps=20", "seed=0,1"], "seed-0__job-0"),
        (7, ["seed=0"], ["seed=0"], "job-7"),
        (0, [], [], "job-0"),
        # Slashes, brackets, quotes and spaces are replaced.
        (1, ["hydra/launcher=basic"], ["hydra/launcher=basic,b"], "hydra.launcher-basic__job-1"),
        (0, ["env.id=ALE/Pong-v5"], ["env.id=ALE/Pong-v5,ALE/X"], "env.id-ALE-Pong-v5__job-0"),
        (0, ["agent.hidden=[64,64]"], ["agent.hidden=[64,64],[9]"], "agent.hidden-64-64__job-0"),
        (0, ["++env.kwargs.x='a b:c'"], ["++env.kwargs.x='a b:c',d"], "env.kwargs.x-ab-c__job-0"),
        # So is a plus, which must not become a minus.
        (0, ["agent.clip=1e+38"], [], "agent.clip-1e38__job-0"),
        (0, ["agent.clip=1e-38"], [], "agent.clip-1e-38__job-0"),
        # Keys of a sweeper are not on the command line, or only with their range.
        (12, ["agent.gamma=0.97"], [], "agent.gamma-0.97__job-12"),
        (12, ["agent.gamma=0.97"], ["agent.gamma=interval(0.9,1)"], "agent.gamma-0.97__job-12"),
        (2, ["experiment=cartpole_ppo"], ["experiment=glob(*)"], "experiment-cartpole_ppo__job-2"),
        (2, ["seed=4"], ["seed=range(5)"], "seed-4__job-2"),
    ],
)
def test_run_names_list_differing_overrides(job, overrides, typed, name):
    assert job_name(job, overrides, typed) == name


def test_run_names_are_short_enough_for_file_systems():
    overrides = [f"env.kwargs.some_long_keyword_{i}=value" for i in range(50)]
    name = job_name(123456, overrides, [])
    assert len(name.encode()) <= LONGEST + 20 < 255
    assert name.startswith("env.kwargs.some_long_keyword_0-value__")
    assert name.endswith("-value__job-123456")
    assert job_name(1, ["env.kwargs.x=" + "a" * 300], []) == "job-1"


@pytest.mark.parametrize(
    "typed", ["hydra/launcher=basic", "env.id=a:b/C-v0", "x=[1,-2.5e+3]", "y='z'"]
)
def test_run_names_need_no_quotes_on_the_command_line(typed):
    name = job_name(5, [typed], [])
    assert OverridesParser.create().parse_override(f"resume=multirun/{name}").value() == (
        f"multirun/{name}"
    )
    assert shlex.quote(name) == name
    assert glob.escape(name) == name
