"""Which keys the error of a run at its limit names."""

from types import SimpleNamespace

import pytest

from steadyrl.memory.bounds import Bound
from steadyrl.memory.limit.holders import Holders, higher_limit
from steadyrl.memory.limit.meters import Level
from steadyrl.memory.process import MB, Tree, Worker

LIMIT = Level(Bound("cgroup limit 1.00 GB", 1000 * MB, 1000 * MB), 0)
OWN = Level(Bound("memory.limit_mb=1000", 1000 * MB, 1000 * MB, shared=False), 0, is_own=True)


def holders_of(buffers, workers=()):
    """Return what names holders where each worker shares all pages but `workers` megabytes."""
    each = tuple(
        Worker(pid, f"environment-{pid}", 700 * MB, size * MB) for pid, size in enumerate(workers)
    )
    tree = Tree(0, 1000 * MB, 0, 700 * MB, len(each), 1, 9, each)
    monitor = SimpleNamespace(tree=tree, refresh_tree=lambda: tree.kept, card=None)
    return Holders(monitor, {name: size * MB for name, size in buffers.items()}, list)


def remedy(buffers, workers=(), level=LIMIT):
    holders = holders_of(buffers, workers)
    return holders.remedy(holders.read(level), level)


def test_what_processes_hold_adds_up_to_what_the_limit_counts():
    holders = holders_of({"replay": 400}, (30, 50))
    assert holders.held(holders.read(OWN)) == (
        "This process holds 920 MB (replay 400 MB), 2 more 80.0 MB (the largest is "
        "environment-1, 50.0 MB)"
    )


def test_growth_is_told_apart_from_sharing_less():
    holders = holders_of({}, (30, 50))
    holders.begin(OWN)
    alone = holders_of({}, (80,)).read(OWN)  # the pages that another shared count for it now
    assert holders.grown(alone) == ""
    alone.heaps["environment-0"] += 90 * MB
    assert holders.grown(alone) == "What grew since the start: environment-0 by 90.0 MB. "


@pytest.mark.parametrize(("buffers", "workers", "lower"), [
    ({"replay": 4, "networks": 2}, (), ""),
    ({"networks": 600}, (300,), ""),  # one environment is needed
    ({"rollout": 20}, (30, 30, 30), ""),
    ({"replay": 400, "networks": 2}, (30, 30), ", or lower agent.replay.capacity"),
    ({"rollout": 400}, (), ", or lower agent.rollout_steps"),
    ({"replay": 4}, (100, 110), ", or lower env.num_envs"),
    ({"replay": 300}, (100, 100), ", or lower agent.replay.capacity or env.num_envs"),
])  # fmt: skip
def test_at_the_limit_keys_of_what_holds_much_are_named(buffers, workers, lower):
    assert remedy(buffers, workers) == f"Raise the limit{lower}"
    raised = f"Raise the limit to memory.limit_mb=1250 or more{lower}"
    assert remedy(buffers, workers, OWN) == raised


@pytest.mark.parametrize(("used", "enough"), [(300, 500), (700, 900), (1000, 1250), (1300, 1500)])
def test_a_higher_limit_leaves_what_training_takes(used, enough):
    level = OWN._replace(bound=OWN.bound._replace(limit=min(used, 1000) * MB, used=used * MB))
    assert higher_limit(level) == f"memory.limit_mb={enough}"
