"""The house stands: imports run down only, and every key of the configuration is read."""

import ast
import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from attribute_reads import attribute_reads

from steadyrl.agents.registry import ALGORITHMS
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.training.config.settings import RunSettings

ROOT = Path(__file__).parent.parent
FLOORS = {
    "memory": 1,
    "buffers": 2,
    "envs": 2,
    "agents": 3,
    "training": 4,
    "train": 5,
    "steadyrl": 5,
    "scripts": 5,
}
# Of the environments, agents know the types and the settings only.
AGENTS_MAY_KNOW = {"steadyrl.envs.types", "steadyrl.envs.settings"}


def sources():
    for floor in FLOORS:
        path = ROOT / f"{floor}.py"
        yield from [path] if path.is_file() else sorted((ROOT / floor).rglob("*.py"))


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
    assert [w for w in wrong if not w.startswith(("steadyrl.py", "train.py", "scripts"))] == []


@pytest.mark.parametrize(
    ("floor", "module", "expected"),
    [
        ("memory", "steadyrl.agents.dqn.agent", True),
        ("buffers", "steadyrl.envs.types", True),
        ("envs", "steadyrl.core.errors", False),
        ("agents", "steadyrl.envs.factory", True),
        ("agents", "steadyrl.envs.types", False),
        ("agents", "steadyrl.training.run.run", True),
        ("training", "steadyrl.agents.base", False),
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


def all_settings():
    roots = [RunSettings, *(entry.settings for entry in ALGORITHMS.values())]
    return {cls for root in roots for cls in settings_classes(root)}


def unread(classes, texts):
    """Return 'Class.key' for the keys that no code reads from an object of their class.

    A check is no use: what is only looked at when it is refused changes nothing.
    """
    reads = attribute_reads(texts, checks=frozenset({"__post_init__", "refuse_unfit"}))

    def names(cls):
        yield from (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
        if hasattr(cls, "refuse_unfit"):  # the protocol of all agents' settings
            yield "steadyrl.agents.registry.AgentSettings"

    return sorted(
        f"{cls.__name__}.{field.name}"
        for cls in classes
        for field in fields(cls)
        if not any((name, field.name) in reads for name in names(cls))
    )


def texts():
    house = (path for path in sources() if "scripts" not in path.parts)
    return {module_name(path): path.read_text() for path in house}


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_key_is_read():
    classes = all_settings()
    assert sum(len(fields(cls)) for cls in classes) > 60
    assert unread(classes, texts()) == []


def test_a_key_counts_as_read_only_where_its_own_class_is_asked():
    """`capacity` is asked of something else, `alpha` in a check only, `device` by its name."""
    planted = """
from steadyrl.buffers.replay.settings import ReplaySettings

class Barrel:
    capacity: int = 3

def build(settings: ReplaySettings, barrel: Barrel) -> float:
    found = settings if barrel.capacity else None
    assert found is not None
    return settings.beta_start + found.beta_end

class Checked:
    settings: ReplaySettings
    def __post_init__(self) -> None:
        assert self.settings.alpha

class User:
    def __init__(self, settings: ReplaySettings | None) -> None:
        self._given = settings
    @property
    def given(self) -> ReplaySettings:
        assert self._given is not None
        return self._given
    def use(self, name: str = "device") -> tuple[object, object]:
        return self.given.prioritized, getattr(self.given, "device")
"""
    settings = (ROOT / "buffers" / "settings.py").read_text()
    found = unread(
        {ReplaySettings}, {"steadyrl.buffers.replay.settings": settings, "planted": planted}
    )
    assert found == [f"ReplaySettings.{key}" for key in ("alpha", "capacity", "device")]


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def test_no_file_is_over_450_lines_and_no_function_over_60():
    wrong = []
    for path in sources():
        name, lines = str(path.relative_to(ROOT)), len(path.read_text().splitlines())
        wrong += [f"{name}: {lines} lines"] if lines > 450 else []
        wrong += [f"{name}: {f} has {n} lines" for f, n in functions(path) if n > 60]
    assert wrong == []


def test_the_files_that_the_pages_name_are_there():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    folders = "|".join([*FLOORS, "configs", "docs", "tests"])
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(
            rf"(?<![\w/])(?:{folders})/[\w/]+\.(?:py|md|yaml)\b", page.read_text()
        )
    }
    assert len(named) > 20
    assert sorted(name for name in named if not (ROOT / name[1]).is_file()) == []


def test_one_oldest_python_is_asked_for_everywhere():
    """By pip, by the linter, by the types and by the README; no dependency sorts by older ones."""
    text = (ROOT / "pyproject.toml").read_text()
    asked = tomllib.loads(text)
    oldest = asked["project"]["requires-python"].removeprefix(">=")
    assert oldest == "3.11"  # what logging.StreamHandler[TextIO] needs
    assert asked["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert asked["tool"]["mypy"]["python_version"] == oldest
    assert f"Python {oldest} or later" in (ROOT / "README.md").read_text()
    assert "python_version" not in text.replace("python_version =", "")
