"""docs/architecture.svg is up to date, and docs/architecture.py draws the actual imports."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from page_script import page_script

from tests.test_architecture import ALGORITHM_FOLDERS, ORDER, arrows, texts
from tests.test_architecture import part as part_in_order

ROOT = Path(__file__).parents[2]
HOW = "run: python docs/architecture.py"


@pytest.fixture(scope="module")
def drawer():
    return page_script("architecture")


def test_the_picture_is_up_to_date(drawer):
    assert drawer.PICTURE.read_text() == drawer.picture(), HOW


def test_the_page_embeds_the_picture():
    assert "](architecture.svg)" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_picture_uses_the_imports_of_the_architecture_test(drawer):
    layers = {layer for height in drawer.LAYERS for layer in height}
    expected = [
        (module, target)
        for module, target in arrows(texts())
        if {module.split(".")[0], target.split(".")[0]} <= layers and "." in target
    ]
    found = {(module, drawer.part(target)) for module, target in drawer.imports() if "." in target}
    assert {(module, drawer.part(target)) for module, target in expected} == found


def test_every_part_is_drawn_above_its_imports(drawer):
    shown = [node.text for node in ElementTree.fromstring(drawer.picture()).iter() if node.text]
    for layer, order in ORDER.items():
        parts = {name for name in order if name not in ALGORITHM_FOLDERS}
        assert {name.replace(".", "/") for name in parts} <= set(shown)
        graph = drawer.layers(drawer.imports())[layer].parts
        height = drawer.levels(graph)
        for name, targets in graph.items():
            assert all(height[target] < height[name] for target in targets), name


def test_a_new_algorithm_does_not_change_the_picture(drawer, monkeypatch):
    assert drawer.part("agents.dqn.loss") == drawer.part("agents.ppo.agent") == "agents.algorithms"
    assert part_in_order("agents.dqn.loss") == "dqn"
    before = drawer.picture()
    new_imports = [
        ("agents.new.agent", "agents.learner.learner"),
        ("agents.registry", "agents.new.agent"),
    ]
    entry = drawer.ALGORITHMS["dqn"]._replace(module="steadyrl.agents.new.agent")
    found = list(drawer.imports())
    monkeypatch.setattr(drawer, "imports", lambda: [*found, *new_imports])
    assert drawer.picture() != before
    monkeypatch.setitem(drawer.ALGORITHMS, "new", entry)
    assert drawer.picture() == before


def test_transitive_arrows_are_omitted_and_cycles_raise(drawer):
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert drawer.reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert drawer.levels(graph) == {"a": 2, "b": 1, "c": 0}
    with pytest.raises(ValueError, match=re.escape("a -> b -> a")):
        drawer.levels({"a": {"b"}, "b": {"a"}})
