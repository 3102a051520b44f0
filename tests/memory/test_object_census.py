import gc
from collections import deque
from types import ModuleType

import numpy as np
import torch

from steadyrl.memory.object_census import growth_report, take_census


class Keeper:
    def __init__(self):
        self.kept = []


class SlotKeeper:
    __slots__ = ("kept",)

    def __init__(self):
        self.kept = deque()


class Item:
    pass


def named(lines, *clues):
    return [line for line in lines if all(clue in line for clue in clues)]


def test_a_grown_container_is_named_with_owner_and_element_type():
    plain, slotted, module = Keeper(), SlotKeeper(), ModuleType("users.module")
    module.kept = {}
    before = take_census()
    plain.kept += [bytes(1000) for _ in range(2000)]
    slotted.kept.extend(str(i) * 200 for i in range(3000))
    module.kept.update({i: [bytes(1000)] for i in range(900)})
    lines = growth_report(before)
    assert named(lines, "Keeper.kept: list with 2,000 more elements (bytes), about 2.0")
    assert named(lines, "SlotKeeper.kept: deque with 3,000 more elements (str)")
    assert named(lines, "users.module.kept: dict with 900 more elements (list)")


class Arrays:
    __slots__ = ("counts", "log")

    def __init__(self):
        self.log, self.counts = np.zeros(0), {}


class Wrapper:
    def __init__(self, env):
        self.env = env


def test_arrays_and_dicts_of_numbers_are_named_with_their_path():
    arrays, keeper = Arrays(), Keeper()
    held = {"env": [Wrapper(arrays)], "callbacks": (keeper,)}
    before = take_census(held)
    for _ in range(3):
        arrays.log = np.append(arrays.log, np.zeros(100_000))  # another array each time
    arrays.counts.update((float(i), i) for i in range(20_000))
    assert not gc.is_tracked(arrays.counts)  # nor is an array: both have no referents
    keeper.kept += [bytes(1000) for _ in range(2000)]
    lines = growth_report(before, held)
    assert "env[0].env.log: array of float64, about 2.40 MB more" in lines
    assert named(lines, "env[0].env.counts: dict of plain values, about ")
    assert named(lines, "Keeper.kept: list with 2,000 more elements", ", at callbacks[0].kept")
    assert not named(growth_report(take_census(held), held), "env[0]")


def test_arrays_of_a_constant_size_are_not_growth():
    held = {"agent": Keeper()}
    held["agent"].kept = [np.zeros(100_000), np.zeros(100_000)[10:]]
    before = take_census(held)
    held["agent"].kept[0] = np.ones(100_000)
    assert named(growth_report(before, held), "agent") == []


def test_unchanged_containers_are_not_growth():
    keeper = Keeper()
    keeper.kept += [bytes(1000) for _ in range(2000)]
    before = take_census()
    keeper.kept[:100] = [bytes(1000) for _ in range(100)]
    assert named(growth_report(before), "Keeper.kept") == []


def test_garbage_is_not_growth():
    before = take_census()
    gc.disable()
    try:
        for _ in range(50):
            keeper = Keeper()
            keeper.kept += [keeper] * 5000
        del keeper
        assert named(growth_report(before), "Keeper") == []
    finally:
        gc.enable()


def test_growing_numbers_of_tensors_and_objects_are_named():
    before = take_census()
    tensors = [torch.zeros(3, 5) for _ in range(20)]
    items = [Item() for _ in range(30)]
    lines = growth_report(before)
    assert named(lines, f"{len(tensors)} more tensors float32[3, 5] on cpu")
    assert named(lines, f"{len(items)} more objects of tests (30 Item)")


def test_growth_reports_leave_no_objects():
    before = take_census()
    for _ in range(3):
        growth_report(before)
    gc.collect()
    start = len(gc.get_objects())
    for _ in range(5):
        growth_report(before)
    gc.collect()
    assert len(gc.get_objects()) - start < 20


def test_objects_whose_type_has_no_module_are_counted_and_searched():
    # Types of C extensions may have none, such as SWIG's in Box2D.
    kind = eval("type('NoModule', (), {})", {})
    held = kind()
    held.arrays = [np.zeros(200_000)]
    before = take_census({"env": held})
    assert before.types[".NoModule"] == 1
    held.arrays += [np.zeros(2_000_000) for _ in range(2)]
    held.kept = [bytes(1000) for _ in range(2000)]
    lines = growth_report(before, {"env": held})
    assert named(lines, ".NoModule.kept: list with 2,000 more elements (bytes)")
