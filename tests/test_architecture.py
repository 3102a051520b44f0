"""The house stands: imports run down only, in no circle, and every key is read."""

import ast
import re
import tomllib
from dataclasses import fields, is_dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from attribute_reads import attribute_reads

from steadyrl.agents.registry import ALGORITHMS
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.training.config.settings import RunSettings

ROOT = Path(__file__).parent.parent
PACKAGE = "steadyrl"
# From below. Floors that stand equally high may not import one another.
FLOORS = {"core": 1, "memory": 2, "buffers": 3, "envs": 3, "agents": 4, "training": 5}
# What starts programs stands above all floors.
ABOVE = ("loop", "command", "__main__")
# Every algorithm that the registry names is a folder, and they stand equally high.
ALGORITHM_FOLDERS = [entry.module.split(".")[-2] for entry in ALGORITHMS.values()]
ONE_EACH = ",".join(ALGORITHM_FOLDERS)
# The wings of a floor, and modules that lie in none, from below; no folder means in any order.
WINGS = {
    "envs": "settings types faults step_clock arithmetic descendants wrappers registration "
    "encoding vector kernels rendering backends factory",
    "buffers": "memory_layout replay rollout",
    "agents": "engine learner networks settings base extension engine.cpu actors "
    f"{ONE_EACH} distillation rnd registry update_cost",
    "training": "config logging,checkpoints policies evaluation run distributed setup analysis "
    "sweeps tuning cli",
}
# Of the environments, agents know the types and the settings only.
AGENTS_MAY_KNOW = {"envs.types", "envs.settings"}
MOST_MODULES = 12


def sources():
    """Return every file of the package and of the scripts; links are not followed twice."""
    for name in (*FLOORS, "scripts"):
        yield from sorted((ROOT / name).rglob("*.py"))
    yield from (ROOT / "train.py", *sorted((ROOT / PACKAGE).glob("*.py")))


def module_name(path):
    """Return a file's name below the package: agents.dqn.agent."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return {"train": "loop"}.get(name, name).removesuffix(".__init__").removeprefix(f"{PACKAGE}.")


def texts():
    """Return {module: text} of the package."""
    house = (path for path in sources() if "scripts" not in path.relative_to(ROOT).parts)
    return {module_name(path): path.read_text() for path in house}


def imported(text):
    """Return the modules, and what else they may be, that a text imports, lazily or not."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(house):
    """Return the pairs (importing, imported) of modules of the package, for {module: text}."""
    for module, text in house.items():
        for name in imported(text):
            inner = name.removeprefix(f"{PACKAGE}.")
            if inner != name:
                yield module, inner if inner in house else inner.rpartition(".")[0]


ORDER = {
    floor: {name: place for place, group in enumerate(wings.split()) for name in group.split(",")}
    for floor, wings in WINGS.items()
}


def wing(module):
    """Return the wing that a module is in, or its own name where it is in none."""
    floor, first, *rest = module.split(".")
    inner = f"{first}.{rest[0]}" if rest else first
    return inner if inner in ORDER[floor] else first


def climbs(module, target):
    """Return whether an import runs up or across: between floors, or the wings of one."""
    floor, other = module.split(".")[0], target.split(".")[0]
    if other in ABOVE:
        return floor not in ABOVE
    if floor in ABOVE or other not in FLOORS:
        return False
    if floor != other:
        if (floor, other) == ("agents", "envs"):
            return target not in AGENTS_MAY_KNOW
        return FLOORS[other] >= FLOORS[floor]
    if floor not in WINGS or "." not in target or wing(module) == wing(target):
        return False
    return ORDER[floor][wing(target)] >= ORDER[floor][wing(module)]


def circle(house):
    """Return the modules of a circle of imports, or nothing where there is none."""
    graph = {}
    for module, target in arrows(house):
        if not is_package(target):
            graph.setdefault(module, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def is_package(module):
    return (ROOT / module.replace(".", "/") / "__init__.py").is_file() or module == PACKAGE


def crowded(paths):
    """Return the folders with more modules than somebody can look through."""
    counts = {}
    for path in paths:
        if path.name != "__init__.py":
            counts.setdefault(path.parent, []).append(path)
    return [
        f"{folder}: {len(found)}" for folder, found in counts.items() if len(found) > MOST_MODULES
    ]


def too_long(name, text):
    """Return what of a file is longer than one sitting takes."""
    lines = len(text.splitlines())
    yield from [f"{name}: {lines} lines"] if lines > 450 else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = node.end_lineno - node.lineno + 1
            yield from [f"{name}: {node.name} has {count} lines"] if count > 60 else []


def test_no_import_runs_up_or_across():
    house = texts()
    assert len(set(arrows(house))) > 500
    assert sorted({f"{a} -> {b}" for a, b in arrows(house) if climbs(a, b)}) == []


def test_every_module_has_its_place_in_the_order():
    for module in texts():
        floor = module.split(".")[0]
        if floor in WINGS and "." in module:
            assert wing(module) in ORDER[floor], module


def test_no_imports_run_in_a_circle():
    assert circle(texts()) == []


def test_no_folder_is_crowded_and_no_file_or_function_long():
    house = [path for path in sources() if "scripts" not in path.relative_to(ROOT).parts]
    assert crowded(house) == []
    named = [(str(path.relative_to(ROOT)), path.read_text()) for path in sources()]
    assert [line for name, text in named for line in too_long(name, text)] == []


@pytest.mark.parametrize(
    ("module", "target", "expected"),
    [
        ("memory.watch", "agents.dqn.agent", True),
        ("core.jit", "memory.process", True),
        ("buffers.replay.buffer", "envs.types", True),
        ("envs.vector", "core.errors", False),
        ("envs.vector", "envs.factory", True),
        ("envs.factory", "envs.backends.sync", False),
        ("agents.dqn.agent", "envs.factory", True),
        ("agents.dqn.agent", "envs.types", False),
        ("agents.dqn.agent", "agents.ppo.loss", True),
        ("agents.learner.learner", "agents.engine.engine", False),
        ("agents.learner.learner", "agents.engine.cpu.network", True),
        ("agents.engine.graphs.trace", "agents.engine.cpu.network", True),
        ("agents.dqn.build", "agents.distillation.loss", True),
        ("agents.base", "training.run.run", True),
        ("training.run.run", "agents.base", False),
        ("training.run.job", "training.sweeps.jobs", True),
        ("training.setup", "loop", True),
        ("loop", "training.setup", False),
    ],
)
def test_an_import_up_is_seen_and_one_down_is_none(module, target, expected):
    assert climbs(module, target) is expected


def test_a_planted_circle_is_seen_though_one_of_its_imports_is_lazy():
    house = texts()
    below, above = "core.saved_state", "core.state"
    assert (above, below) in set(arrows(house))
    house[below] += "\ndef late():\n    from steadyrl.core.state import give\n"
    assert {below, above} <= set(circle(house))


def test_a_planted_relative_import_is_seen():
    with pytest.raises(AssertionError, match="relative import"):
        list(imported("from . import state"))


def test_a_crowd_and_what_is_long_are_seen():
    assert crowded([ROOT / "core" / f"m{i}.py" for i in range(13)]) == [f"{ROOT / 'core'}: 13"]
    long = "def f():\n" + "    x = 1\n" * 60
    assert list(too_long("a.py", long)) == ["a.py: f has 61 lines"]
    assert list(too_long("a.py", "x = 1\n" * 451)) == ["a.py: 451 lines"]


def patched_bare(text):
    """Yield what is patched by a string that names a module of ours without the package's name.

    A second copy of the module changes then, and the test tries nothing.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".setattr", ".delattr")):
            name = node.args[0]
            if isinstance(name, ast.Constant) and name.value.split(".")[0] in (*FLOORS, *ABOVE):
                yield name.value


def test_no_module_is_patched_without_the_name_of_the_package():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not list(patched_bare(path.read_text())), path
    planted = 'monkeypatch.setattr("memory.monitor.read_tree", len)'
    assert list(patched_bare(planted)) == ["memory.monitor.read_tree"]


def test_init_files_hold_a_docstring_only():
    wings = [path for floor in FLOORS for path in (ROOT / floor).rglob("__init__.py")]
    assert len(wings) > 20
    for path in wings:
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
    reads = attribute_reads(texts, checks=frozenset({"__post_init__", "validate_fit"}))

    def names(cls):
        yield from (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
        if hasattr(cls, "validate_fit"):  # the protocol of all agents' settings
            yield "steadyrl.agents.registry.AgentSettings"

    return sorted(
        f"{cls.__name__}.{field.name}"
        for cls in classes
        for field in fields(cls)
        if not any((name, field.name) in reads for name in names(cls))
    )


def in_package(house):
    return {f"{PACKAGE}.{module}": text for module, text in house.items()}


def test_every_key_is_read():
    classes = all_settings()
    assert sum(len(fields(cls)) for cls in classes) > 60
    assert unread(classes, in_package(texts())) == []


def test_a_key_counts_as_read_only_where_its_own_class_is_asked():
    """`capacity` is asked of something else, `alpha` in a check only, `device` by its name."""
    planted = """
from steadyrl.buffers.replay.settings import ReplaySettings

class Barrel:
    capacity: int = 3

def build(settings: ReplaySettings, barrel: Barrel) -> object:
    found = settings if barrel.capacity else None
    assert found is not None
    return settings.beta_start + found.beta_end, found.anneal_beta, found.beta_warmup

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
    settings = (ROOT / "buffers" / "replay" / "settings.py").read_text()
    found = unread(
        {ReplaySettings}, {"steadyrl.buffers.replay.settings": settings, "planted": planted}
    )
    assert found == [f"ReplaySettings.{key}" for key in ("alpha", "capacity", "device")]


def test_the_files_that_the_pages_name_are_there():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    folders = "|".join([*FLOORS, "scripts", "steadyrl", "configs", "docs", "tests"])
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
