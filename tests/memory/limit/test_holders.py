"""Which keys the error of a run at its limit names."""

from types import SimpleNamespace

import pytest

from steadyrl.memory.bounds import Bound
from steadyrl.memory.limit.holders import Holders, higher_limit
from steadyrl.memory.limit.meters import Level
from steadyrl.memory.process import MB, Tree, Worker

LIMIT = Level(Bound("cgroup limit 1.00 GB", 1000 * MB, 1000 * MB), 0)
OWN = Level(Bound("memory.limit_mb=1000", 1000 * MB, 1000 * MB, shared=False), 0, is_own=True)


def remedy(buffers, workers=(), level=LIMIT):
    each = tuple(Worker(pid, f"environment-{pid}", size * MB) for pid, size in enumerate(workers))
    tree = Tree(0, 1000 * MB, 0, 700 * MB, len(each), 1, 9, each)
    monitor = SimpleNamespace(tree=tree, refresh_tree=lambda: tree.kept, card=None)
    sizes = {name: size * MB for name, size in buffers.items()}
    holders = Holders(monitor, sizes, list)
    return holders.remedy(holders.read(level), level)


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
