"""Fuzzing of the command line: every run finishes or is rejected in one line.

`STEADYRL_FUZZ=5000 python -m pytest tests/test_fuzz*.py` runs more examples. Each file
runs one half, so that two processes can share them.
"""

import contextlib
import dataclasses
import gc
import io
import os
import signal
import sys
import types
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from algorithms import NAMES, eager, small
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from steadyrl.agents.registry import settings_type
from steadyrl.loop import train
from steadyrl.training.cli.main import main
from steadyrl.training.config.settings import CONFIGS, RunSettings

EXAMPLES = int(os.environ.get("STEADYRL_FUZZ", "240")) // 2  # in each of two files
REFUSED = (2, 7)
SAVED, NOTHING_SAVED = ("resume=", "init_from="), 3

# Settings with which any run ends in a tenth of a second.
SMALL = (
    "device=cpu",
    "eval.every=0",
    "memory.monitor.tree_every_seconds=0",
)
AGENTS = {name: (*eager(name), *small(name).quick) for name in NAMES}
CHEAP_ENVS = ("cartpole", "acrobot", "pendulum", "mountaincar", "frozenlake", "taxi")
# Keys that are slow by nature or have effects outside the run.
SKIPPED_KEYS = {
    "agent.compile",  # "true" compiles for seconds
    "device",
    "run_dir",
    "env.backend",  # processes and other packages
}
EDGES = {
    int: ("-1", "0", "1", "2", "3", "7", "1e18", "1e19", "1e400", "1.5", "9" * 400, "0x10", "1_0"),
    float: ("-1", "0", "1e-320", "1e-9", "0.5", "1", "1.0000001", "1e37", "1e308", "nan", "-inf"),
    bool: ("true", "false", "1", "yes"),
    str: ("''", "CartPole-v1", "Nothing-v0", ":b", "no.such:Env-v0", "a b", "x" * 300),
}
WRONG = (
    *("null", "[]", "{}", "[1]", "[[1]]", "{a:1}", "abc", "'1 '", "'\u0661'", "${nope}", "${seed}"),
    *(
        "${",
        "1,2",
        "range(3)",
        "???",
        "[",
        "'",
        "\u00fc",
        "a=b",
        "\0",
        "\udc80",
        "\t",
        "",
        "-",
        "$",
    ),
)
UNUSUAL = (
    *("=", "=1", "@a=1", "seed", "+seed=1", "++seed=1", "~seed", "~env", "hydra=null", "hydra.x=1"),
    *("+a.b=1", "env.kwargs.x=1", "++env.kwargs={1:2}", "--seed", "-x", "--cfg", "--info=x"),
    *("lr=1", "agent.lr=1", "experiment=null", "hydra.output_subdir=x", "env@a=cartpole", "a b"),
    *("hydra/launcher=x", "-m --cfg", "--resolve", "agent.name=ppo", "env=[cartpole,taxi]"),
)


def fields(cls, path):
    """Yield (full key, type) of every leaf of a settings class."""
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from fields(hint, f"{path}{name}.")
        else:
            yield path + name, hint


def keys_of(algorithm):
    """Return the type of every key of a run with this algorithm."""
    agents = fields(settings_type(algorithm), "agent.")
    every = {**dict(fields(RunSettings, "")), **dict(agents)}
    return {key: hint for key, hint in every.items() if key not in SKIPPED_KEYS}


KEYS = {name: keys_of(name) for name in NAMES}


def rarely(unusual, usual):
    """Draw `usual` most of the time, otherwise hardly any run would start."""
    return st.sampled_from((True, False, False, False, False)).flatmap(
        lambda chosen: unusual if chosen else usual
    )


def values(hint):
    """Draw the text of a value of this type: in range, at the edges, or wrong."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, get_args(hint)))
    if origin is Literal:
        right = st.sampled_from([str(choice) for choice in get_args(hint)])
    elif origin is tuple:
        items = st.lists(st.integers(-1, 5), max_size=3)
        right = items.map(lambda numbers: str(numbers).replace(" ", ""))
    elif hint is int:
        right = rarely(st.sampled_from(EDGES[int]), st.integers(1, 9).map(str))
    elif hint is float:
        some = st.floats(0, 1, allow_subnormal=False).map(repr)
        right = rarely(st.sampled_from(EDGES[float]), some)
    else:
        right = st.sampled_from(EDGES.get(hint, ("null", "{}", "{a:1}")))
    return rarely(st.sampled_from(WRONG), right)


def group(name):
    """Draw a choice of a group: one of its files, rarely something else."""
    files = sorted(path.stem for path in (CONFIGS / name).glob("*.yaml"))
    bare = {file: file.partition("_")[0] for file in files}
    good = [file for file in files if name not in ("env", "experiment") or bare[file] in CHEAP_ENVS]
    others = st.sampled_from(("null", "1", "nosuch", "[]", "x.y", "{}", "'", *good))
    return rarely(others, st.sampled_from(good))


@st.composite
def commands(draw):
    """Draw a small algorithm and one to four further overrides of all kinds."""
    algorithm = draw(st.sampled_from(NAMES))
    other = draw(rarely(st.sampled_from(NAMES), st.just(algorithm)))
    base = (*SMALL, *AGENTS[algorithm], "total_steps=9", "log.every=4")
    rest = []
    for kind in draw(st.lists(st.sampled_from(range(20)), min_size=1, max_size=4)):
        if kind < 14:
            key = draw(st.sampled_from(sorted(KEYS[other])))
            value = draw(values(KEYS[other][key]))
            # 1e18 steps are valid but would never end.
            endless = key == "total_steps" and value == "1e18"
            rest.append(f"{key}={'1e19' if endless else value}")
        elif kind < 19:
            name = draw(st.sampled_from(("agent", "env", "env", "env", "memory", "experiment")))
            rest.append(f"{name}={draw(group(name))}")
        else:
            rest += draw(st.sampled_from(UNUSUAL)).split(" ")
    return [*base, *rest]


def is_typed(line, arguments):
    """Return whether a line of an error is about one of the arguments."""
    return any(line.strip().startswith(f"{argument}: ") for argument in arguments)


def command(arguments):
    """Run one command in this process; return its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["train.py", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(train)
    except SystemExit as end:
        return end.code, out.getvalue(), err.getvalue()
    finally:
        sys.argv = before
    return 0, out.getvalue(), err.getvalue()


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Run in a temporary folder; freeze pytest's objects, whose collection would dominate."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    command([*SMALL, *AGENTS[NAMES[0]], "total_steps=9"])
    gc.collect()
    gc.freeze()
    yield tmp_path
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    assert handlers == {number: signal.getsignal(number) for number in handlers}


@pytest.mark.long
def test_every_command_runs_or_is_rejected_in_one_line(quick):
    fuzz(quick, half=0)


def fuzz(quick, half):
    """Run one half of the commands; by default the same ones each time."""
    counts, seen = {"finished": 0, "refused": 0, "diverged": 0}, set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(commands())
    def one(arguments):
        if tuple(arguments) in seen:  # a quarter of them
            return
        seen.add(tuple(arguments))
        before = sorted(quick.iterdir())
        code, out, err = command(arguments)
        assert "Traceback" not in out + err, err
        if code == 0:
            counts["finished"] += 1
            assert err == "", err
        elif code == 5:  # e.g. with a learning rate of 1e37
            counts["diverged"] += 1
            assert err.startswith("error: "), err
        else:
            counts["refused"] += 1
            saved = any(argument.startswith(SAVED) for argument in arguments)
            assert code in REFUSED or (saved and code == NOTHING_SAVED), (code, err)
            # Errors found while building the run may come after the first messages.
            assert len(out.splitlines()) <= 2, out
            first, *others = err.splitlines()
            assert first.startswith("error: "), err
            # Below it, a line for each further key that does not exist.
            assert all(line.startswith("  ") and is_typed(line, arguments) for line in others), err
            assert sorted(quick.iterdir()) == before, "a rejected command leaves no files"

    if "STEADYRL_FUZZ" not in os.environ:
        one = seed(half)(one)
    one()
    print(counts)
    assert counts["finished"] > EXAMPLES / 10
    assert counts["refused"] > EXAMPLES / 10
