"""The Python API: `steadyrl.train` in a process of another program, many times."""

import gc
import importlib
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from command import environment
from hydra import version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

import steadyrl
from steadyrl.core.errors import CommandError, ExpectedError, MemoryBudgetError, SettingError
from steadyrl.envs.arithmetic import flush_subnormals, flushes_subnormals
from steadyrl.envs.types import EnvironmentFailedError
from steadyrl.memory.process import MB, read_rss, read_tree
from steadyrl.training.api.embedded import _job

ROOT = Path(__file__).parent.parent
SMALL = (
    "agent=ppo", "agent.hidden=[8]", "agent.rollout_steps=16", "agent.epochs=1", "env.num_envs=2",
    "agent.minibatches=1", "agent.compile=false", "device=cpu", "total_steps=64", "eval.every=32",
    "eval.episodes=1", "log.every=32",
)  # fmt: skip


def small(folder, *overrides):
    return [*SMALL, f"run_dir={folder / 'run'}", *overrides]


def process_state():
    """Return everything of this process that a run could change and leave changed."""
    logger = logging.getLogger("steadyrl")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
    return {
        "handlers": [signal.getsignal(number) for number in numbers],
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "wakeup": signal.set_wakeup_fd(signal.set_wakeup_fd(-1)),
        "hook": (sys.unraisablehook, sys.excepthook),
        "logging": (logger.level, logger.propagate, list(logger.handlers), logging.root.handlers),
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
        "threads": torch.get_num_threads(),
        "products": torch.get_float32_matmul_precision(),
        "subnormals": flushes_subnormals(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "random": torch.random.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
        "hydra": (GlobalHydra.instance().hydra, HydraConfig.instance().cfg, version.getbase()),
        "import path": list(sys.path),
        "streams": (sys.stdout, sys.stderr, getattr(sys.stdout, "errors", None)),
        "directory": os.getcwd(),
        "descriptors": len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0,
    }


def test_it_returns_summary_directory_and_policy(tmp_path, capsys):
    result = steadyrl.train(small(tmp_path))
    assert result.directory == tmp_path / "run" and (result.directory / "summary.json").is_file()
    assert result.summary.status == "finished" and result.summary.steps >= 64
    assert result.exit_code == 0 and result.score == result.summary.eval_return_mean
    assert result.policy.action_space.contains(result.policy.act([0.0, 0.0, 0.0, 0.0]))
    assert "finished after 65 steps" in capsys.readouterr().out


def test_quiet_prints_nothing(tmp_path, capfd):
    steadyrl.train(small(tmp_path), quiet=True)
    assert capfd.readouterr() == ("", "")
    assert "finished after 65 steps" in (tmp_path / "run" / "train.log").read_text()


def test_the_process_stays_as_it_was(tmp_path, monkeypatch):
    """Also where the program has settings of its own."""
    steadyrl.train(small(tmp_path / "first"))  # imports
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnicodeWarning)
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        before = process_state()
        try:
            with torch.no_grad():
                steadyrl.train(small(tmp_path / "second", "threads=1", "deterministic=true"))
            assert process_state() == before
            with pytest.raises(ExpectedError):
                steadyrl.train(small(tmp_path / "third", "env.id=Nope-v0"))
            assert process_state() == before
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_float32_matmul_precision("highest")
            torch.set_num_threads(1)
    flush_subnormals(False)


def test_signals_and_malloc_are_not_touched(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("another program's process")

    monkeypatch.setattr(signal, "signal", refuse)
    monkeypatch.setattr(signal, "set_wakeup_fd", refuse)
    # mallopt, malloc_trim and madvise are called through it.
    monkeypatch.setattr("steadyrl.memory.cache_cleaner.libc", refuse)
    monkeypatch.setattr("steadyrl.memory.host.malloc.libc", refuse)
    forced = "memory.cache.min_reclaimable_mb=0", "memory.cache.every_rollouts=1"
    assert steadyrl.train(small(tmp_path, *forced)).summary.status == "finished"


class Grows(steadyrl.Callback):
    """Keeps 100 MB more at each step."""

    def __init__(self):
        self.kept = []

    def on_step(self, run):
        self.kept.append(np.ones(100 * MB, np.uint8))


def test_a_memory_limit_is_raised_once_the_run_is_saved(tmp_path):
    gc.collect()
    limit_mb = int(read_tree(psutil.Process()).kept / MB) + 150
    with pytest.raises(MemoryBudgetError, match=rf"limit_mb={limit_mb} is reached") as caught:
        steadyrl.train(small(tmp_path, f"memory.limit_mb={limit_mb}"), callbacks=[Grows()])
    (command,) = caught.value.details
    assert "resume=" in command and str(tmp_path / "run") in command
    (raised,) = re.findall(r" (memory\.limit_mb=\d+)$", command)
    assert int(raised.partition("=")[2]) > limit_mb + 100
    assert f"Raise the limit to {raised} or more" in str(caught.value)
    assert (tmp_path / "run/policy/manifest.json").exists()
    resumed = steadyrl.train([f"resume={tmp_path / 'run'}", raised])
    assert resumed.summary.status == "finished" and resumed.summary.resumed_from_step is not None


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        (["agent.hiden=[8]"], CommandError, "did you mean agent.hidden"),
        (["env.id=Nope-v0"], SettingError, "no such environment"),
        (["total_steps=0"], SettingError, "must be 1 or more"),
        (["seeds=[0,1]"], SettingError, "are many runs"),
        (["--multirun", "seed=0,1"], CommandError, "--multirun: is for the command line"),
        (["hydra.verbose=true"], CommandError, "is for the command line"),
        ("total_steps=64", SettingError, "must be a list of KEY=VALUE"),
    ],
)
def test_errors_are_raised(tmp_path, overrides, error, text):
    given = overrides if isinstance(overrides, str) else small(tmp_path, *overrides)
    with pytest.raises(error, match=text) as caught:
        steadyrl.train(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("agent=ppo env=cartpole", ["agent=ppo", "env=cartpole"]),
        ("agent.hidden=[8, 8]  +env.kwargs.x=1", ["agent.hidden=[8, 8]", "+env.kwargs.x=1"]),
        ({"agent": "ppo", "total_steps": 64}, ["agent=ppo", "total_steps=64"]),
        (["agent=ppo", 3], ["env=cartpole"]),
        (None, ["env=cartpole"]),
    ],
)
def test_other_kinds_of_overrides_are_refused_with_what_to_write(given, advice):
    with pytest.raises(SettingError, match=re.escape(f"KEY=VALUE: overrides={advice}")):
        steadyrl.train(given)


class Reach(gym.Env):
    """An environment that a script may pass."""

    def __init__(self, goal=0):
        self.goal = goal


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (Reach, "must be an id that is registered: {} and 'env.id=Reach-v0'"),
        (Reach(3), "must be an id that is registered: {} and 'env.id=Reach-v0'"),
        (("total_steps", 1000), "must be KEY=VALUE: 'total_steps=1000'"),
        ({"env": "cartpole", "seed": 1}, "must be KEY=VALUE: 'env=cartpole', 'seed=1'"),
        (3, "must be KEY=VALUE: overrides=['env=cartpole']"),
    ],
)
def test_an_entry_that_is_no_text_is_named_with_what_to_write(given, line):
    with pytest.raises(SettingError) as caught:
        steadyrl.train(["agent=ppo", given, "total_steps=64"])
    assert caught.value.field == "overrides[1]"
    assert caught.value.reason == line.format('gym.register("Reach-v0", Reach)')


def test_a_removed_working_directory_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(CommandError, match="the working directory cannot be found"):
        steadyrl.train(small(tmp_path))


def test_the_packages_names_are_listed():
    names = set(dir(steadyrl))
    assert names >= {"Callback", "evaluate", "load", "read", "train"}
    assert {name for name in names if not name.startswith("__")} == set(steadyrl.__all__)


def test_an_environments_fault_is_raised(tmp_path):
    overrides = ["env.id=failing_envs:Failing-v0", "env.kwargs.where=step", "env.max_restarts=0"]
    with pytest.raises(EnvironmentFailedError, match=r"the traceback is in .*train\.log"):
        steadyrl.train(small(tmp_path, *overrides, "env.kwargs.late=20"))


def test_the_policy_of_an_own_environment_loads_without_naming_it_again(tmp_path):
    result = steadyrl.train(small(tmp_path, "env.id=masked_envs:Doors-v0"))
    assert result.policy.action_space.n > 1
    assert steadyrl.evaluate(result.policy, episodes=1).episodes == 1
    loaded = steadyrl.load(result.directory)  # its file describes its spaces
    assert loaded.action_space == result.policy.action_space
    with pytest.raises(ExpectedError, match="imports a module"):
        steadyrl.evaluate(loaded, episodes=1)


def used():
    """Return resident bytes, open descriptors and objects, after a collection."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    return read_rss(psutil.Process()), descriptors, len(gc.get_objects())


@pytest.mark.parametrize(
    ("calls", "least"), [(5, 2), pytest.param(100, 10, marks=pytest.mark.slow)]
)
def test_many_calls_in_one_process_do_not_grow(tmp_path, calls, least):
    """After the first calls, which import and compile."""
    for call in range(least):
        steadyrl.train(small(tmp_path / str(call)), quiet=True)
    rss, descriptors, objects = used()
    for call in range(least, calls):
        steadyrl.train(small(tmp_path / str(call)), quiet=True)
    more_rss, more_descriptors, more_objects = used()
    assert more_descriptors == descriptors
    assert more_objects - objects < 20 * (calls - least)
    assert more_rss - rss < 8_000_000 + 20_000 * (calls - least)


CELL = """
import steadyrl
result = steadyrl.train({overrides})
print(result.summary.status, result.policy.act([0.0, 0.0, 0.0, 0.0]) in (0, 1))
"""


@pytest.mark.slow
def test_a_notebook_trains(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
    import nbformat

    cells = [CELL.format(overrides=small(tmp_path / name)) for name in ("first", "second")]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": ROOT}}).execute()
    for cell in book.cells:
        printed = "".join(output.get("text", "") for output in cell.outputs)
        assert "finished after 65 steps" in printed and "finished True" in printed


AGAIN = """
import multiprocessing, sys, steadyrl
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
    sys.exit(process.exitcode)
else:  # what a script without that question does
    {call}
"""


EVALUATE = "e.evaluate_policy(None, env=(), episodes=1, seed=0, deterministic=True)"


@pytest.mark.parametrize(
    "call",
    [
        "steadyrl.train(['total_steps=10'])",
        f"from steadyrl.training.api import evaluation as e; {EVALUATE}",
    ],
)
def test_a_process_that_imports_the_script_again_neither_trains_nor_evaluates(tmp_path, call):
    (tmp_path / "script.py").write_text(AGAIN.format(call=call))
    where = {"cwd": tmp_path, "env": environment()}
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, **where)
    assert done.returncode == 1 and 'below `if __name__ == "__main__":`' in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])  # spawn: as on macOS, or with a GPU in use
def test_the_pages_environment_of_a_script_runs_in_processes(tmp_path, method):
    page = (ROOT / "docs" / "python.md").read_text()
    [code] = re.findall(
        r"```python\n(import gymnasium as gym\nimport numpy.*?)```", page, re.DOTALL
    )
    call = 'result = steadyrl.train(["agent=ppo", "env.id=Reach-v0", "total_steps=20_000"])'
    overrides = small(tmp_path, "env.id=Reach-v0", "env.backend=async")
    assert call in code
    guarded = f"""
if __name__ == "__main__":
    from steadyrl.envs.backends import worker_handle

    worker_handle.start_methods = lambda: ("{method}",)
    print(steadyrl.train({overrides}).summary.status)
"""
    (tmp_path / "script.py").write_text("import steadyrl\n" + code.replace(call, guarded))
    where = {"cwd": tmp_path, "env": environment()}
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, **where)
    assert done.returncode == 0 and done.stdout.endswith("finished\n"), done.stderr


def test_threads_compose_one_after_the_other(tmp_path):
    def overrides(run):
        return [*small(tmp_path), f"run_name=run{run}"]

    with ThreadPoolExecutor(4) as threads:
        jobs = list(threads.map(lambda run: _job(overrides(run)), range(8)))
    assert [job.settings.run.run_name for job in jobs] == [f"run{run}" for run in range(8)]


def status_of_training(folder):
    """Return the status of a run with workers, in a process that may have no children."""
    assert multiprocessing.current_process().daemon
    status = steadyrl.train(small(folder, "env.backend=async"), quiet=True).summary.status
    assert multiprocessing.current_process().daemon
    return status


def test_a_process_of_a_pool_trains_with_workers(tmp_path):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(status_of_training, (tmp_path,)) == "finished"


def test_a_run_of_an_environment_that_a_script_registers_goes_on_by_its_module(tmp_path):
    """The command line imports a module; the environment is the same."""
    importlib.import_module("toy_environments")  # registers Counter-v0
    steadyrl.train(small(tmp_path, "env.id=Counter-v0"), quiet=True)
    resumed = [f"resume={tmp_path / 'run'}", "total_steps=128"]
    with pytest.raises(SettingError, match="cannot change when a run is continued"):
        steadyrl.train([*resumed, "env.id=toy_environments:Tiny-v0"], quiet=True)
    result = steadyrl.train([*resumed, "env.id=toy_environments:Counter-v0"], quiet=True)
    assert result.summary.resumed_from_step == 64 and result.summary.steps == 128
