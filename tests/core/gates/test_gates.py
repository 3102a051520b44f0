"""Each private name of torch and Numba is removed in turn: runs go on, and say so in one line."""

import ast
import logging
import re
import sys

import numpy as np
import pytest
import torch
from logged_runs import Lines, opened, train
from opened import job

from steadyrl.agents.engine.graphs import wide_products
from steadyrl.core import jit
from steadyrl.core.gates import gate as gate_module
from steadyrl.core.gates.gate import Feature, Gate, Unsupported, look_up
from steadyrl.core.gates.numba_private import NUMBA
from steadyrl.core.gates.torch_private import TORCH, release_pool, versions
from steadyrl.training.setup import build
from tests.test_architecture import ROOT, sources

GATES = {"torch": TORCH, "numba": NUMBA}
NAMES = [
    (library, name)
    for library, gate in GATES.items()
    for name in dict.fromkeys(name for each in gate.features.values() for name in each.names)
]
# torch's own public functions call these, or they cannot be removed: only the gate misses them.
STAY = {
    "numba.core.event.Listener",
    "numba.core.event.register",
    "numba.core.event.unregister",
    "torch._fused_adam_",
    "torch.autograd.Variable._execution_engine.run_backward",
    "torch.Tensor._version",
}
OF_CUDA = {"snapshot"}  # a CPU build of torch lacks their names
COMPILING = {"trace", "host_code", "products"}
SMALL = ("env=cartpole", "env.num_envs=2", "agent.hidden=[8]", "total_steps=64", "eval.every=0")
RUNS = {
    "dqn": ("agent.batch_size=4", "agent.learning_starts=8", "agent.replay.capacity=64"),
    "ppo": ("agent.rollout_steps=16", "agent.epochs=1", "agent.minibatches=1"),
}


@pytest.fixture(autouse=True)
def nothing_was_logged_before():
    for gate in GATES.values():
        gate._logged.clear()
    yield
    for gate in GATES.values():
        gate._logged.clear()


def remove(monkeypatch, name):
    """Remove a private name from its library, as if it had moved."""
    real = gate_module.look_up

    def missing(path):
        if path == name:
            raise AttributeError(path)
        return real(path)

    if name in STAY or not is_there(name):
        monkeypatch.setattr(gate_module, "look_up", missing)
        return
    place, _, last = name.rpartition(".")
    owner = look_up(place)
    if isinstance(owner, type):  # from the class that has it
        owner = next(each for each in owner.__mro__ if last in vars(each))
    if name in sys.modules:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(owner, last)


def is_there(name):
    try:
        look_up(name)
    except (ImportError, AttributeError):
        return False
    return True


def lines(caplog, library):
    messages = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    return [each for each in messages if re.match(rf"{library} [\d.]+", each)]


def run(folder, agent, **changes):
    """Train a small agent to its end in this process; return its weights."""
    keys = (f"agent={agent}", *SMALL, *RUNS[agent], *(f"{k}={v}" for k, v in changes.items()))
    given = job(folder, *keys, quick=False)
    with build(given) as (env, agent):
        env.reset()
        train(opened(given, agent, Lines()), env, agent, 64)
        assert agent.updates > 0
        return {name: tensor.clone() for name, tensor in agent.weights().items()}


@pytest.mark.parametrize(("library", "name"), NAMES)
def test_without_a_private_name_runs_go_on_with_one_line(
    library, name, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(wide_products, "faster_here", lambda: True)  # on any processor
    gate = GATES[library]
    features = [each for each, (names, *_) in gate.features.items() if name in names]
    remove(monkeypatch, name)
    for agent in RUNS:
        run(
            tmp_path / agent,
            agent,
            **{"agent.compile": bool(COMPILING & {*features}) and library == "torch"},
        )
    # What such a run does not need, or needs once in a process, is asked for here.
    assert not any(gate.offers(feature) for feature in features)
    found = lines(caplog, library)
    assert len(found) == len({*found}) <= len(features)
    assert all(f"has no {name}: " in line for line in found) and found


def test_what_is_missing_is_said_once_and_what_is_there_not_at_all(caplog):
    gate = Gate(
        "torch", {"there": Feature(("torch.Tensor",), ""), "gone": Feature(("torch.x",), "so")}
    )
    assert gate.offers("there")
    assert [gate.offers("gone") for _ in range(3)] == [False] * 3
    assert lines(caplog, "torch") == [f"torch {gate.version} has no torch.x: so"]
    with pytest.raises(KeyError, match="not listed"):
        gate["torch._C"]


@pytest.mark.parametrize(
    ("newest", "version", "proven"),
    [("2.15", "2.15.1+cu132", True), ("2.15", "2.16.0", False), ("2.9", "2.13.0", False)],
)
def test_a_version_that_nobody_tried_is_not_trusted(newest, version, proven, caplog):
    gate = Gate("torch", {"new": Feature(("torch.Tensor",), "runs slowly", newest)})
    gate.version = version
    assert gate.offers("new") is proven
    said = (
        f"torch {version} is newer than {newest}, the newest that this is tried with: runs slowly"
    )
    assert lines(caplog, "torch") == ([] if proven else [said])


def test_updates_of_a_version_that_nobody_tried_run_eagerly(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(TORCH, "version", "99.0")
    for agent in RUNS:
        run(tmp_path / agent, agent, **{"agent.compile": "true"})
    (line,) = lines(caplog, "torch")
    assert line.endswith("updates run eagerly")


def test_the_public_way_computes_the_same_bits(tmp_path, monkeypatch):
    for agent in RUNS:
        direct = run(tmp_path / f"{agent}-direct", agent)
        with monkeypatch.context() as patch:
            patch.setattr(TORCH, "offers", lambda feature: False)
            public = run(tmp_path / f"{agent}-public", agent)
        assert direct and all((direct[name] == public[name]).all() for name in direct)


def test_a_failed_capture_is_left_as_it_is_where_it_cannot_be_cleaned_up(monkeypatch, caplog):
    remove(monkeypatch, "torch._C._cuda_releasePool")
    release_pool(0, (0, 1))
    release_pool(0, (0, 1))
    assert len(lines(caplog, "torch")) == 1


def test_weights_whose_changes_cannot_be_counted_always_count_as_changed(monkeypatch):
    weights = (np.zeros(1),)
    remove(monkeypatch, "torch.Tensor._version")
    changed = versions()
    assert changed(weights) != changed(weights)


def test_code_that_asks_for_memory_ahead_is_compiled_without_asking(monkeypatch, caplog):
    from steadyrl.buffers.replay.prefetch import prefetch

    def total(x):
        prefetch(x, 0)
        return x.sum()

    remove(monkeypatch, "numba.core.cgutils.get_item_pointer")
    assert jit.njit(total)(np.ones(3)) == 3
    assert len(lines(caplog, "numba")) == 1


PRIVATE_PARTS = ("numba.core", "numba.np", "numba.misc")
# Attributes of their objects that have no path of their own.
OF_OBJECTS = {
    "_cache", "_cache_file", "_index_path", "_source_stamp", "_parameters", "_buffers", "_version",
    "_execution_engine", "overloads", "fndesc",
}  # fmt: skip


def private_names(text):
    """Yield what of torch and Numba a text uses that is private."""
    listed = OF_OBJECTS | {name.rpartition(".")[2] for _, name in NAMES}
    listed = {name for name in listed if name.startswith("_")} | {"overloads", "fndesc"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            paths = [whole] if re.fullmatch(r"[\w.]+", whole) else []
            if node.attr in listed and ast.unparse(node.value) not in ("self", "cls"):
                yield whole
        else:
            continue
        for path in paths:
            library, *parts = path.split(".")
            hidden = any(part.startswith("_") and not part.endswith("__") for part in parts)
            deep = path.startswith(PRIVATE_PARTS) and library == "numba"
            if library in GATES and (hidden or deep):
                yield path


def test_private_names_are_used_behind_the_gates_only():
    behind = {ROOT / "core" / "gates" / f"{library}_private.py" for library in GATES}
    assert behind <= {*sources()}
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        if path not in behind and "scripts" not in path.parts
        for name in private_names(path.read_text())
    }
    assert sorted(found) == []
    for path in behind:  # what the test looks for is what they hold
        assert path.stem == "torch_private" or [*private_names(path.read_text())]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("import torch\ntorch._fused_adam_([])", True),
        ("from torch._inductor import config", True),
        ("from torch.utils._python_dispatch import TorchDispatchMode", True),
        ("from numba.core import cgutils", True),
        ("import numba.np.numpy_support", True),
        ("def f(layer):\n    return layer._parameters", True),
        ("def f(cache):\n    return cache._cache_file", True),
        ("def f(variable):\n    variable._execution_engine.run_backward()", True),
        ("def f(dispatcher):\n    return dispatcher.overloads", True),
        ("import torch\ntorch.__version__, torch.optim.Adam", False),
        ("from numba import njit", False),
        ("class A:\n    def f(self):\n        return self._cache", False),
    ],
)
def test_a_planted_private_name_is_seen(text, seen):
    assert bool([*private_names(text)]) is seen


@pytest.mark.parametrize(
    ("library", "feature"),
    [(library, feature) for library, gate in GATES.items() for feature in gate.features],
)
def test_the_versions_here_have_all_names(library, feature):
    """This test names what has moved; a gate lists nothing for nobody."""
    built = torch.backends.cuda.is_built() or feature not in OF_CUDA
    if "before" not in feature and built:  # other names of older versions
        GATES[library].require(feature)
    texts = [path.read_text() for path in sources()]
    assert sum(text.count(f'"{feature}"') for text in texts) > 1 or feature in (
        "device_code",
        "cache",
    )
    with pytest.raises(Unsupported):
        Gate("torch", {"gone": Feature(("torch.x",), "so")}).require("gone")
