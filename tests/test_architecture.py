"""Architecture: imports run downwards without cycles, folders are small, every key is read."""

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
# Layers from the lowest. Layers of equal height must not import each other.
LAYERS = {"core": 1, "memory": 2, "buffers": 3, "envs": 3, "agents": 4, "training": 5}
# Modules that start programs are above all layers.
ABOVE = ("loop", "command", "__main__")
# Every algorithm of the registry has a folder; all have equal height.
ALGORITHM_FOLDERS = [entry.module.split(".")[-2] for entry in ALGORITHMS.values()]
ONE_EACH = ",".join(ALGORITHM_FOLDERS)
# Parts of each layer and modules outside parts, from the lowest; other layers have no order.
PARTS = {
    "envs": "settings types faults step_clock arithmetic descendants user_exit worker_memory "
    "wrappers registration encoding vector kernels rendering backends factory",
    "buffers": "memory_layout replay rollout",
    "agents": "learner networks settings engine.cpu,engine.graphs engine "
    "learner.learner base extension actors replay_sampler replay_agent,rollout_agent "
    f"{ONE_EACH} distillation rnd registry update_cost",
    "training": "config logging,checkpoints mirror policies evaluation analysis report callbacks "
    "speed profiler run distributed continued setup sweeps tuning cli api",
}
# Agents may import only types and settings of environments.
AGENTS_MAY_KNOW = {"envs.types", "envs.settings"}
MOST_MODULES = 12


def sources():
    """Yield every file of the package and the scripts once."""
    for name in (*LAYERS, "scripts"):
        yield from sorted((ROOT / name).rglob("*.py"))
    yield from (ROOT / "train.py", *sorted((ROOT / PACKAGE).glob("*.py")))


def module_name(path):
    """Return a file's name below the package: agents.dqn.agent."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return {"train": "loop"}.get(name, name).removesuffix(".__init__").removeprefix(f"{PACKAGE}.")


def texts():
    """Return {module: text} of the package."""
    modules = (path for path in sources() if "scripts" not in path.relative_to(ROOT).parts)
    return {module_name(path): path.read_text() for path in modules}


def imported(text):
    """Yield imported names, also of lazy imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(modules):
    """Yield (importing, imported) pairs of modules of the package, for {module: text}."""
    for module, text in modules.items():
        for name in imported(text):
            inner = name.removeprefix(f"{PACKAGE}.")
            if inner != name:
                yield module, inner if inner in modules else inner.rpartition(".")[0]


ORDER = {
    layer: {name: height for height, group in enumerate(parts.split()) for name in group.split(",")}
    for layer, parts in PARTS.items()
}


def part(module):
    """Return a module's part, or its own name outside parts."""
    layer, first, *rest = module.split(".")
    inner = f"{first}.{rest[0]}" if rest else first
    return inner if inner in ORDER[layer] else first


def runs_up_or_across(module, target):
    """Return whether an import runs up or across, between layers or between parts of a layer."""
    layer, other = module.split(".")[0], target.split(".")[0]
    if other in ABOVE:
        return layer not in (*ABOVE, PACKAGE)
    if layer in (*ABOVE, PACKAGE) or other not in LAYERS:  # the package itself: its Python API
        return False
    if layer != other:
        if (layer, other) == ("agents", "envs"):
            return target not in AGENTS_MAY_KNOW
        return LAYERS[other] >= LAYERS[layer]
    if layer not in PARTS or "." not in target or part(module) == part(target):
        return False
    return ORDER[layer][part(target)] >= ORDER[layer][part(module)]


def cycle(modules):
    """Return the modules of an import cycle, or an empty list."""
    graph = {}
    for module, target in arrows(modules):
        if not is_package(target):
            graph.setdefault(module, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def is_package(module):
    return (ROOT / module.replace(".", "/") / "__init__.py").is_file() or module == PACKAGE


def crowded_folders(paths):
    """Return folders with more than MOST_MODULES modules."""
    counts = {}
    for path in paths:
        if path.name != "__init__.py":
            counts.setdefault(path.parent, []).append(path)
    return [
        f"{folder}: {len(found)}" for folder, found in counts.items() if len(found) > MOST_MODULES
    ]


def too_long(name, text):
    """Yield a file and its functions that exceed the length limits."""
    lines = len(text.splitlines())
    yield from [f"{name}: {lines} lines"] if lines > 450 else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = node.end_lineno - node.lineno + 1
            yield from [f"{name}: {node.name} has {count} lines"] if count > 60 else []


def test_no_import_runs_up_or_across():
    modules = texts()
    assert len(set(arrows(modules))) > 500
    wrong = sorted({f"{a} -> {b}" for a, b in arrows(modules) if runs_up_or_across(a, b)})
    assert wrong == [], (
        "move what both need down, by the order of LAYERS and PARTS above; no algorithm imports "
        f"another's folder, and agents know of envs only {', '.join(sorted(AGENTS_MAY_KNOW))}"
    )


def test_every_module_has_a_place_in_the_order():
    for module in texts():
        layer = module.split(".")[0]
        if layer in PARTS and "." in module:
            assert part(module) in ORDER[layer], f"{module}: add it to PARTS, above its imports"


def test_imports_have_no_cycles():
    assert cycle(texts()) == []


def test_folders_files_and_functions_are_within_limits():
    modules = [path for path in sources() if "scripts" not in path.relative_to(ROOT).parts]
    assert crowded_folders(modules) == [], "move related modules into a folder of their own"
    names = [(str(path.relative_to(ROOT)), path.read_text()) for path in sources()]
    assert [line for name, text in names for line in too_long(name, text)] == [], "split by topic"


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
        ("agents.engine.cpu.network", "agents.engine.direct", True),
        ("agents.engine.graphs.trace", "agents.engine.cpu.network", True),
        ("agents.engine.direct", "agents.learner.optimizers.adam", False),
        ("agents.networks.activations", "agents.engine.graphs.trace", True),
        ("agents.dqn.build", "agents.distillation.loss", True),
        ("agents.base", "training.run.run", True),
        ("training.run.run", "agents.base", False),
        ("training.run.job", "training.sweeps.jobs", True),
        ("training.setup", "loop", True),
        ("loop", "training.setup", False),
    ],
)
def test_upward_imports_are_detected(module, target, expected):
    assert runs_up_or_across(module, target) is expected


def test_a_planted_cycle_with_a_lazy_import_is_detected():
    modules = texts()
    below, above = "core.saved_state", "core.state"
    assert (above, below) in set(arrows(modules))
    modules[below] += "\ndef late():\n    from steadyrl.core.state import give\n"
    assert {below, above} <= set(cycle(modules))


def test_a_planted_relative_import_is_detected():
    with pytest.raises(AssertionError, match="relative import"):
        list(imported("from . import state"))


def test_crowded_folders_and_long_files_are_detected():
    assert crowded_folders([ROOT / "core" / f"m{i}.py" for i in range(13)]) == [
        f"{ROOT / 'core'}: 13"
    ]
    long_function = "def f():\n" + "    x = 1\n" * 60
    assert list(too_long("a.py", long_function)) == ["a.py: f has 61 lines"]
    assert list(too_long("a.py", "x = 1\n" * 451)) == ["a.py: 451 lines"]


def patched_bare(text):
    """Yield patched names that lack the package's name.

    Such a patch changes a second copy of the module, without effect on the tested one.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".setattr", ".delattr")):
            name = node.args[0]
            if isinstance(name, ast.Constant) and name.value.split(".")[0] in (*LAYERS, *ABOVE):
                yield name.value


def test_patched_names_start_with_the_package():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not list(patched_bare(path.read_text())), path
    planted = 'monkeypatch.setattr("memory.monitor.read_tree", len)'
    assert list(patched_bare(planted)) == ["memory.monitor.read_tree"]


def test_init_files_contain_only_a_docstring():
    found = [path for layer in LAYERS for path in (ROOT / layer).rglob("__init__.py")]
    assert len(found) > 20
    for path in found:
        body = ast.parse(path.read_text()).body
        assert len(body) == 1 and isinstance(body[0], ast.Expr), f"{path}: a docstring alone"


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
    """Return 'Class.key' for keys that no code reads from an object of their class.

    Reads in validation do not count: such a key would have no effect.
    """
    reads = attribute_reads(texts, checks=frozenset({"__post_init__", "validate_fit"}))

    def names(cls):
        yield from (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
        if hasattr(cls, "validate_fit"):  # AgentSettings is the protocol of all agents' settings
            yield "steadyrl.agents.registry.AgentSettings"

    return sorted(
        f"{cls.__name__}.{field.name}"
        for cls in classes
        for field in fields(cls)
        if not any((name, field.name) in reads for name in names(cls))
    )


def in_package(modules):
    return {f"{PACKAGE}.{module}": text for module, text in modules.items()}


def test_every_configuration_key_is_read():
    classes = all_settings()
    assert sum(len(fields(cls)) for cls in classes) > 60
    assert unread(classes, in_package(texts())) == [], (
        "read each key from an object of its class, outside of __post_init__ and validate_fit; "
        "annotate the object's type"
    )


def test_keys_count_as_read_on_their_own_class_only():
    """`capacity` is read from another class, `alpha` in validation only, `device` by getattr."""
    planted = """
from steadyrl.buffers.replay.settings import ReplaySettings

class Barrel:
    capacity: int = 3

def build(settings: ReplaySettings, barrel: Barrel) -> object:
    found = settings if barrel.capacity else None
    assert found is not None
    shape = found.anneal_beta, found.beta_warmup, found.normalize_weights
    return settings.beta_start + found.beta_end, shape

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


def test_files_named_in_documentation_exist():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    folders = "|".join([*LAYERS, "scripts", "steadyrl", "configs", "docs", "tests"])
    names = {
        (page.name, path)
        for page in pages
        for path in re.findall(
            rf"(?<![\w/])(?:{folders})/[\w/]+\.(?:py|md|yaml)\b", page.read_text()
        )
    }
    assert len(names) > 20
    assert sorted(name for name in names if not (ROOT / name[1]).is_file()) == []


def test_the_oldest_python_version_is_consistent():
    """pip, ruff, mypy and README agree; no dependency has markers for older versions."""
    text = (ROOT / "pyproject.toml").read_text()
    config = tomllib.loads(text)
    oldest = config["project"]["requires-python"].removeprefix(">=")
    assert oldest == "3.11"  # what logging.StreamHandler[TextIO] needs
    assert config["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert config["tool"]["mypy"]["python_version"] == oldest
    assert f"Python {oldest} or later" in (ROOT / "README.md").read_text()
    assert "python_version" not in text.replace("python_version =", "")
