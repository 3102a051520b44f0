"""docs/ARCHITECTURE.svg is what docs/architecture.py draws, and that is what the imports say."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from page_script import page_script

from tests.test_architecture import ALGORITHM_FOLDERS, ORDER, arrows, texts
from tests.test_architecture import wing as wing_in_order

ROOT = Path(__file__).parents[2]
HOW = "run: python docs/architecture.py"


@pytest.fixture(scope="module")
def drawer():
    return page_script("architecture")


def test_the_picture_is_as_it_would_be_drawn(drawer):
    assert drawer.PICTURE.read_text() == drawer.picture(), HOW


def test_the_page_shows_it():
    assert "](ARCHITECTURE.svg)" in (ROOT / "docs" / "ARCHITECTURE.md").read_text()


def test_it_reads_the_imports_that_the_rules_are_held_against(drawer):
    floors = {floor for height in drawer.FLOORS for floor in height}
    inside = [
        (module, target)
        for module, target in arrows(texts())
        if {module.split(".")[0], target.split(".")[0]} <= floors and "." in target
    ]
    found = {(module, drawer.wing(target)) for module, target in drawer.imports() if "." in target}
    assert {(module, drawer.wing(target)) for module, target in inside} == found


def test_every_wing_is_in_the_picture_and_stands_above_what_it_imports(drawer):
    shown = [node.text for node in ElementTree.fromstring(drawer.picture()).iter() if node.text]
    for floor, order in ORDER.items():
        wings = {name for name in order if name not in ALGORITHM_FOLDERS}
        assert {name.replace(".", "/") for name in wings} <= set(shown)
        graph = drawer.floors(drawer.imports())[floor].wings
        height = drawer.levels(graph)
        for name, targets in graph.items():
            assert all(height[target] < height[name] for target in targets), name


def test_an_algorithm_more_changes_nothing(drawer, monkeypatch):
    assert drawer.wing("agents.dqn.loss") == drawer.wing("agents.ppo.agent") == "agents.algorithms"
    assert wing_in_order("agents.dqn.loss") == "dqn"
    before = drawer.picture()
    more = [("agents.new.agent", "agents.learner.learner"), ("agents.registry", "agents.new.agent")]
    entry = drawer.ALGORITHMS["dqn"]._replace(module="steadyrl.agents.new.agent")
    found = list(drawer.imports())
    monkeypatch.setattr(drawer, "imports", lambda: [*found, *more])
    assert drawer.picture() != before
    monkeypatch.setitem(drawer.ALGORITHMS, "new", entry)
    assert drawer.picture() == before


def test_an_arrow_that_follows_from_others_is_left_out_and_a_circle_is_named(drawer):
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert drawer.reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert drawer.levels(graph) == {"a": 2, "b": 1, "c": 0}
    with pytest.raises(ValueError, match=re.escape("a -> b -> a")):
        drawer.levels({"a": {"b"}, "b": {"a"}})
