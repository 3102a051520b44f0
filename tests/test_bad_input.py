"""Invalid commands are rejected in one line, before torch is imported."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from steadyrl.agents.registry import ALGORITHMS

ROOT = Path(__file__).parent.parent

# overrides → parts of the message: the full key, the value, the nearest valid choice.
CASES = {
    "agent.learning_rat=1": ["agent.learning_rat=1", "agent.learning_rate"],
    "+agent.lrr=3": ["agent.lrr=3", "agent."],
    "agent.learning_rate=abc": ["agent.learning_rate=abc", "number"],
    "agent.learning_rate=-1": ["agent.learning_rate=-1", "above 0"],
    "agent.learning_rate=nan": ["agent.learning_rate=nan", "finite"],
    "agent.learning_rate=1e4": ["agent.learning_rate=10000", "at most 1,000"],
    "agent=ppo agent.learning_rate=1e4": ["agent.learning_rate=10000", "at most 1,000"],
    "agent=ppo agent.epochs=1e9": ["agent.epochs=1000000000", "at most 1,000"],
    "agent=ppo agent.log_std_init=-50": ["agent.log_std_init=-50", "between -20 and 20"],
    "agent=ppo agent.minibatches=1e9": ["agent.minibatches=", "a rollout has 1,024 samples"],
    "agent=ppo agent.grad_accumulation=1e9": ["agent.grad_accumulation=", "at most"],
    "agent=ppo agent.hidden=[1e9]": ["agent.hidden=", "at most"],
    "agent.updates_per_train=1e9": ["agent.updates_per_train=", "at most"],
    "agent.teacher.temperature=1e-30": ["agent.teacher.temperature=1e-30", "at least 1e-6"],
    "agent.distribution.kind=c51 agent.distribution.v_min=0 agent.distribution.v_max=1e-42": [
        "agent.distribution.v_min=0",
        "coincide",
    ],
    "agent.distribution.v_min=999999.99 agent.distribution.v_max=1e6": [
        "agent.distribution.v_min=",
        "51 atoms",
    ],
    "agent.n_step=1e9": ["agent.n_step=", "at most"],
    "agent=ppo total_steps=1023": [
        "total_steps=1023",
        "one rollout of 1,024 steps",
        "rollout_steps",
    ],
    "agent=ppo env.num_envs=8 total_steps=8184": ["total_steps=8184", "8,192"],
    "agent.learning_rate=inf": ["agent.learning_rate=inf", "finite"],
    "agent=sac": ["agent=sac", "dqn"],
    "env=cartpol": ["env=cartpol", "cartpole"],
    "env.id=NoSuch-v0": ["env.id=NoSuch-v0"],
    "env.id=CartPol-v1": ["env.id=CartPol-v1", "CartPole-v1"],
    "total_steps=0": ["total_steps=0", "1 or more"],
    "total_steps=-5": ["total_steps=-5", "1 or more"],
    "total_steps=1.5": ["total_steps=1.5", "integer"],
    "env.num_envs=0": ["env.num_envs=0", "1"],
    "agent.batch_size=0": ["agent.batch_size=0", "above 0"],
    "agent.hidden=[]": ["agent.hidden=[]", "[64,64]"],
    "agent.hidden=[64,-1]": ["agent.hidden=[64,-1]", "above 0"],
    "device=tpu": ["device=tpu", "auto, cpu, cuda"],
    "agent=dqn env=pendulum": ["agent=dqn", "Pendulum-v1", "agent=ppo"],
    "agent.gamma=1.5": ["agent.gamma=1.5", "between 0 and 1"],
    "seed=-1": ["seed=-1", "0 or more"],
    "seeds=[]": ["seeds=[]", "names none"],
    "resume=": ["resume=", "names no run"],
    "run_dir=": ["run_dir=: is empty", "name a directory"],
    "run_dir=''": ["run_dir=''", "is empty"],
    "hydra.run.dir=": ["hydra.run.dir=", "is empty"],
    "-m seed=1 hydra.sweep.dir=": ["hydra.sweep.dir=", "is empty"],
    "--config-dir=": ["--config-dir", "is empty"],
    "init_from=''": ["init_from=", "names no run"],
    "seeds=[1,2,1]": ["seeds=[1,2,1]", "names 1 twice"],
    "seeds=[0,-1]": ["seeds=[0,-1]", "0 or more"],
    "seeds=0,1": ["seeds=0,1", "'seeds=[0,1,2]'"],
    "seeds=3": ["seeds=3", "list of integers"],
    "seeds=[1,2] seed=3": ["seeds=[1,2]", "cannot be combined with seed="],
    "seeds=[1,2] seed=0": ["seeds=[1,2]", "cannot be combined with seed="],
    "seeds=${nope}": ["seeds: ", "'nope' not found"],
    "seeds=[1,2] agent.gamma=1.5": ["agent.gamma=1.5", "between 0 and 1"],
    "seeds=[1,2] env=pendulum": ["agent=dqn", "Pendulum-v1", "agent=ppo"],
    "agent.replay.capacity=10": ["agent.replay.capacity=10", "one batch"],
    "experiment=nosuch": ["experiment=nosuch"],
    "experiment=cartpole_dq": ["experiment=cartpole_dq", "cartpole_dqn"],
    "memory.limit_mb=-1": ["memory.limit_mb=-1"],
    "agent=[": ["agent=["],
    # Numbers
    "seed=" + 400 * "9": ["seed=999", "too large"],
    "seed=1e400": ["seed=inf", "finite"],
    "seed='\u0661'": ["seed=\u0661", "integer"],
    "agent.gamma='0x1p-3'": ["agent.gamma=0x1p-3", "number"],
    "env.num_envs=16 total_steps=15": ["env.num_envs=16", "total_steps=15"],
    "env.frame_stack=1e6": ["env.frame_stack=1000000", "at most 1,000"],
    "env.num_envs=1e9": ["env.num_envs=1000000000", "at most 65,536"],
    "env.step_timeout=1e300": ["env.step_timeout=1e+300", "too large"],
    "agent.learning_rate=1e308": ["agent.learning_rate=1e+308", "too large"],
    "agent=ppo agent.epochs=1e30": ["agent.epochs=1e+30", "too large"],
    "threads=100000": ["threads=100000", "cores"],
    "threads=4294967296": ["threads=4294967296", "cores"],
    "seed=${nope} seed=-1": ["seed=-1", "0 or more"],  # the last value counts
    # Groups
    "env=null": ["env=null", "no such env", "cartpole"],
    "agent=1": ["agent=1", "no such agent", "dqn, ppo"],
    "memory=5": ["memory=5", "no such memory", "default"],
    "agent=[dqn,ppo]": ["agent=[dqn,ppo]", "one name", "-m"],
    "agent.name=ppo": ["agent.name=ppo", "agent=…"],
    "agent.name={}": ["agent.name={}", "text"],
    "~agent": ["agent", "configs/agent"],
    "~seed": ["seed", "missing"],
    "hydra=null": ["hydra=null"],
    "+experiment=cartpole_dqn": ["+experiment=cartpole_dqn", "without +"],
    "agent=ppo experiment=cartpole_dqn": [
        "experiment=cartpole_dqn: is a preset for dqn",
        "agent=ppo",
        "experiment=cartpole_ppo",
    ],
    # Keys
    "@a=1": ["@a=1", "names no key"],
    "=1": ["=1", "names no key"],
    "+a.b.c=4": ["+a.b.c=4", "no such key"],
    "agent=ppo agent.n_step=3": ["agent.n_step=3", "is a key of dqn", "the agent is ppo"],
    "agent=ppo +agent.n_step=3": ["agent.n_step=3", "is a key of dqn", "the agent is ppo"],
    "agent.lr=1": ["agent.lr=1", "did you mean agent.learning_rate?"],
    "lr=1e-3": ["lr=1e-3", "did you mean agent.learning_rate?"],
    "n_envs=3": ["n_envs=3", "did you mean env.num_envs?"],
    "num_envs=3": ["num_envs=3", "did you mean env.num_envs?"],
    "hydra.foo=1": ["hydra.foo=1", "no such key"],
    "hydra.output_subdir=here": ["hydra.output_subdir=here", ".hydra/"],
    "hydra.run.dir=here seed=x": ["seed=x", "integer"],
    # Several values, interpolations, characters
    "seed=0,1": ["seed=0,1", "-m"],
    "env=cartpole,acrobot": ["env=cartpole,acrobot", "-m"],
    "seed=${nope}": ["seed: ", "'nope' not found"],
    "seed=${seed}": ["seed: ", "Recursive"],
    "seed=${oc.decode:[}": ["seed=${oc.decode:[}"],
    "seed=${": ["seed=${", "cannot be read"],
    "run_dir=übung": ["run_dir=übung", "'run_dir=\"übung\"'"],
    "run_dir=a\0b": ["a\\x00b", "not printable"],
    "run_dir=a\udc80b": ["a\\udc80b", "not printable"],
    # Options
    "--seed 1": ["--seed", "seed=1"],
    "--seed=1": ["--seed=1", "seed=1"],
    "--env CartPole-v1": ["--env", "without dashes: env.id=CartPole-v1"],
    "--env cartpole": ["--env", "without dashes: env=cartpole"],
    "--total-timesteps 1000": ["--total-timesteps", "without dashes: total_steps=1000"],
    "--learning-rate=1": ["--learning-rate=1", "without dashes: agent.learning_rate=1"],
    "agent=ppo --n-steps 8": ["--n-steps", "without dashes: agent.rollout_steps=8"],
    "--cuda": ["--cuda", "without dashes: device=cuda"],
    # Other trainers' habits
    "env=Blackjack-v1": ["env=Blackjack-v1", "write env.id=Blackjack-v1"],
    "env=bugs:Nope-v0": ["env=bugs:Nope-v0", "write env.id=bugs:Nope-v0"],
    "agent.hidden=64,64": ["a list has brackets: 'agent.hidden=[64,64]'"],
    "agent.hidden=[64, 64]": ["agent.hidden=[64,", "leave spaces out"],
    "algo=ppo": ["algo=ppo", "did you mean agent?"],
    "n_timesteps=9": ["n_timesteps=9", "did you mean total_steps?"],
    "agent.clip_coef=1": ["agent.clip_coef=1", "did you mean agent.clip, a key of ppo?"],
    "experiment=/a/experiment/b.yaml": ["not a path", "--config-dir /a experiment=b"],
    "experiment=/a/b.yaml": ["not a path", "--config-dir FOLDER experiment=b"],
    "-m seed=1 --cfg job": ["--multirun and --cfg", "combined"],
    "--cfg nothing": ["--cfg", "nothing", "job"],
    "seed=1 --config-dir": ["--config-dir", "needs a value"],
    "seed=1 --config-dir /no/such": ["/no/such"],
    "--cfg job --package nothing": ["nothing", "not found"],
    "--config-name env/cartpole seed=1": ["seed=1", "no such key"],
    "env@agent=cartpole": ["env@agent=cartpole", "no such key"],
    "--experimental-rerun x": ["--experimental-rerun", "no such option"],
}

# One process for all cases, which also checks that torch was not imported.
DRIVER = """
import contextlib, io, json, sys
from types import SimpleNamespace
from steadyrl.training.cli.main import main

def train(job):
    print("accepted")
    return SimpleNamespace(exit_code=0, score=None)

results = {}
for case in json.load(sys.stdin):
    sys.argv = ["train.py", *case.split(" ")]
    out, err = io.StringIO(), io.StringIO()
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(train)
        except SystemExit as end:
            code = end.code
    results[case] = [code, out.getvalue(), err.getvalue(), "torch" in sys.modules]
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def results_(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(list(CASES)),
        capture_output=True,
        text=True,
        cwd=folder,
        env=python_path(),
        check=True,
    )
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


def python_path():
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("case", CASES)
def test_invalid_commands_are_rejected_in_one_clear_line(results_, case):
    code, out, err, torch_was_imported = results_[case]
    assert code == 2, (out, err)
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert "Traceback" not in err
    for part in CASES[case]:
        assert part in err, err
    assert not torch_was_imported


def outcomes_of(*exceptions):
    """Return (exit code, stdout, stderr, torch imported) of runs that raise these exceptions."""
    driver = DRIVER.replace('print("accepted")', "RAISE[job.settings.run.seed]()")
    raising = "\n".join(f"def raise_{i}():\n    {text}\n" for i, text in enumerate(exceptions))
    names = ", ".join(f"raise_{i}" for i in range(len(exceptions)))
    done = subprocess.run(
        [sys.executable, "-c", f"{raising}\nRAISE = [{names}]\n{driver}"],
        input=json.dumps([f"seed={i}" for i in range(len(exceptions))]),
        capture_output=True,
        text=True,
        env=python_path(),
        check=True,
    )
    return list(json.loads(done.stdout).values())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
def test_exit_code_2_is_kept_when_stderr_cannot_be_written(tmp_path):
    wrong = [sys.executable, str(ROOT / "train.py"), "total_steps=-1"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(wrong, stdout=full, stderr=full, cwd=tmp_path, env=python_path())
    assert done.returncode == 2


def test_bugs_end_with_1_and_name_only_existing_logs():
    [bug, full] = outcomes_of(
        "raise TypeError('of\\nours')",
        "raise MemoryError('Unable to allocate 9 TiB')",
    )
    code, out, err, _ = bug
    assert code == 1
    assert out == ""
    assert "train.log" not in err
    assert "Traceback" in err  # no log file holds the traceback
    assert err.splitlines()[-1].startswith("error: a bug of ours, please report it")
    assert err.splitlines()[-1].endswith("TypeError: of ours")
    code, out, err, _ = full
    assert (code, out, len(err.splitlines())) == (7, "", 1)
    assert "9 TiB" in err
    assert "available" in err


def test_torch_out_of_memory_errors_are_recognised():
    import torch

    from steadyrl.core.errors import error_lines
    from steadyrl.training.cli.failures import out_of_memory

    advice = ". GPU 0 has a total capacity of 8 GiB. " + "If reserved memory is large try … " * 20
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB" + advice)
    cuda = out_of_memory(full)
    assert cuda.exit_code == 7
    assert "2 GiB" in str(cuda) and "If reserved" not in str(cuda)
    assert "Use a smaller replay" in error_lines(cuda)[0]  # and is not cut off
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(host.value).exit_code == 7
    assert out_of_memory(RuntimeError("another")) is None


def test_wrapped_library_loading_errors_are_recognised_as_out_of_memory():
    from steadyrl.training.cli.failures import out_of_memory

    unmapped = "libtorch_cpu.so: failed to map segment from shared object"
    with pytest.raises(OSError, match="libllvmlite") as wrapped:
        try:
            raise OSError(unmapped)
        except OSError as error:
            raise OSError("Could not find/load shared object file 'libllvmlite.so'") from error
    for error in (ImportError(unmapped), OSError(unmapped), wrapped.value):
        line = out_of_memory(error)
        assert line.exit_code == 7 and "ulimit -v" in str(line) and unmapped in str(line)
    # Failed allocations of a run are not import errors.
    assert "Use a smaller replay" in str(
        out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    )
    for error in (ImportError("libcudart.so.13: cannot open"), OSError(errno.ENOENT, "no file")):
        assert out_of_memory(error) is None


def test_bugs_name_the_log_with_the_traceback(tmp_path):
    driver = f"""
import sys
from steadyrl.training.cli.main import main

def train(job):
    job.directory.mkdir(parents=True)
    (job.directory / "train.log").write_text("Traceback (most recent call last)\\nTypeError")
    raise TypeError("ours")

sys.argv = ["train.py", "run_dir={tmp_path}/run"]
main(train)
"""
    done = subprocess.run(
        [sys.executable, "-c", driver], capture_output=True, text=True, env=python_path()
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"{tmp_path}/run/train.log" in line


ACCEPTED = {
    "seed=1 --config-dir .": "dir",
    "hydra.run.dir=here": "here",
    'run_dir="übung"': "übung",
    "train run_dir=there": "there",
    "experiment=null run_dir=there": "there",
}


def test_unusual_valid_commands_are_accepted(tmp_path):
    driver = DRIVER.replace('print("accepted")', "print(job.directory)")
    done = subprocess.run(
        [sys.executable, "-c", driver],
        input=json.dumps(list(ACCEPTED)),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=python_path(),
        check=True,
    )
    for case, (code, out, err, _) in json.loads(done.stdout).items():
        assert (code, err) == (None, ""), case
        directory = Path(out.strip())
        assert directory.is_relative_to(tmp_path)
        assert ACCEPTED[case] in (directory.name, "dir")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["agent.learning_rat=1", "env=cartpol", "device=cuda"])
def test_the_real_command_rejects_invalid_overrides(tmp_path, case):
    if case == "device=cuda":
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device")
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), case],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=python_path(),
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert case in done.stderr
    assert len(done.stderr.splitlines()) <= 6
    assert list(tmp_path.iterdir()) == []


def test_help_fits_on_a_screen(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'outside_algorithm'}"},
        check=True,
    )
    lines = done.stdout.replace(f"{ROOT}/", "").splitlines()  # where a clone is, is its owner's
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert (
        f"agent={', '.join([*sorted(ALGORITHMS), 'outside.a2c', 'outside.fourier'])}" in done.stdout
    )
    assert all(entry.cls in lines[0] for entry in ALGORITHMS.values())
