"""The house stands: imports run down only, and every key of the configuration is read."""

import ast
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from agents.registry import ALGORITHMS
from training.settings import RunSettings

ROOT = Path(__file__).parent.parent
FLOORS = {
    "memory": 1,
    "buffers": 2,
    "envs": 2,
    "agents": 3,
    "training": 4,
    "train": 5,
    "scripts": 5,
}
# Of the environments, agents know the types and the settings only.
AGENTS_MAY_KNOW = {"envs.types", "envs.settings"}


def sources():
    for floor in FLOORS:
        path = ROOT / floor
        yield from [ROOT / f"{floor}.py"] if floor == "train" else sorted(path.rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def climbs(floor, module):
    target = module.split(".")[0]
    if target not in FLOORS or target == floor:
        return False
    if floor == "agents" and target == "envs":
        return module not in AGENTS_MAY_KNOW
    return FLOORS[target] >= FLOORS[floor]


def test_no_import_runs_up_the_floors():
    wrong = []
    for path in sources():
        floor = path.relative_to(ROOT).parts[0].removesuffix(".py")
        wrong += [f"{path.relative_to(ROOT)}: {m}" for m in imported(path) if climbs(floor, m)]
    # train.py is on the top floor and may use everything; its own floor is one file.
    assert [w for w in wrong if not w.startswith(("train.py", "scripts"))] == []


@pytest.mark.parametrize(
    ("floor", "module", "expected"),
    [
        ("memory", "agents.dqn", True),
        ("buffers", "envs.types", True),
        ("envs", "memory.errors", False),
        ("agents", "envs.factory", True),
        ("agents", "envs.types", False),
        ("agents", "training.run", True),
        ("training", "agents.base", False),
        ("training", "train", True),
        ("memory", "numpy", False),
    ],
)
def test_the_rule_itself(floor, module, expected):
    assert climbs(floor, module) is expected


def test_init_files_hold_a_docstring_only():
    for path in ROOT.glob("*/__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1 and isinstance(body[0], ast.Expr), path


def settings_classes(cls):
    yield cls
    for hint in get_type_hints(cls).values():
        for member in (hint, *get_args(hint)):
            if is_dataclass(member):
                yield from settings_classes(member)


def test_every_key_is_read_somewhere():
    """A key counts as read where its attribute is used outside of the checks of its own class."""
    read = set()
    for path in sources():
        if path.name == "settings.py" or path.name.endswith("_settings.py"):
            continue
        tree = ast.parse(path.read_text())
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    roots = [RunSettings, *(entry.settings for entry in ALGORITHMS.values())]
    keys = {
        (cls.__name__, field.name)
        for root in roots
        for cls in settings_classes(root)
        for field in fields(cls)
    }
    assert len(keys) > 40
    assert sorted(key for key in keys if key[1] not in read) == []
