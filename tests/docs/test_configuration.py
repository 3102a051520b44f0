"""docs/configuration.md is up to date, and every key is described."""

from pathlib import Path

import pytest
from page_script import page_script

ROOT = Path(__file__).parents[2]
HOW = "run: python docs/configuration.py"


@pytest.fixture(scope="module")
def writer():
    return page_script("configuration")


def test_the_page_is_up_to_date(writer):
    assert writer.PAGE.read_text() == writer.page(), HOW


def test_every_key_of_every_agent_is_listed(writer):
    known = {"": set(), **{name: set() for name in writer.ALGORITHMS}}
    for heading, path, cls, prefix, inside in writer.sections():
        for key in writer.keys(path):
            known[heading.partition("`")[2].strip("`")].add(prefix + key.name)
            assert inside + key.name in writer.hints(cls)
    assert known[""] >= set(writer.hints(writer.RunSettings))
    for name, algorithm in writer.ALGORITHMS.items():
        assert known[name] | known[""] >= set(writer.hints(algorithm.settings, "agent."))


def test_every_key_is_described(writer):
    undescribed = [
        f"{path.name}: {key.name}"
        for _, path, *_ in writer.sections()
        for key in writer.keys(path)
        if len(key.meaning) < 8
    ]
    assert undescribed == []


def test_comments_above_and_after_keys_are_read(writer, tmp_path):
    (tmp_path / "some.yaml").write_text(
        "defaults: [_self_]\n# Of nobody.\n\nbare: 1\n# Two\n# lines.\nabove: [1, 2]\n"
        "group:  # not a key\n  behind: 3e-4  # at the # side\n  text: '#'\n"
    )
    found = {key.name: (key.default, key.meaning) for key in writer.keys(tmp_path / "some.yaml")}
    assert found == {
        "bare": (1, ""),
        "above": ([1, 2], "Two lines."),
        "group.behind": ("3e-4", "At the # side"),
        "group.text": ("#", ""),
    }
    assert [writer.written(v) for v in ("3e-4", 100_000, None, True, "auto")] == [
        "0.0003",
        "100_000",
        "null",
        "true",
        "auto",
    ]
