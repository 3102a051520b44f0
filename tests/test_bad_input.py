"""Whatever is wrong with a command is said in a line, before torch is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# overrides → what the message must name: the full key, the value, and the nearest valid choice.
CASES = {
    "agent.learning_rat=1": ["agent.learning_rat=1", "agent.learning_rate"],
    "+agent.lrr=3": ["agent.lrr=3", "agent."],
    "agent.learning_rate=abc": ["agent.learning_rate=abc", "number"],
    "agent.learning_rate=-1": ["agent.learning_rate=-1", "above 0"],
    "agent.learning_rate=nan": ["agent.learning_rate=nan", "finite"],
    "agent.learning_rate=inf": ["agent.learning_rate=inf", "finite"],
    "agent=sac": ["agent=sac", "dqn"],
    "env=cartpol": ["env=cartpol", "cartpole"],
    "env.id=NoSuch-v0": ["env.id=NoSuch-v0"],
    "env.id=CartPol-v1": ["env.id=CartPol-v1", "CartPole-v1"],
    "total_steps=0": ["total_steps=0", "1 or more"],
    "total_steps=-5": ["total_steps=-5", "1 or more"],
    "total_steps=1.5": ["total_steps=1.5", "whole number"],
    "env.num_envs=0": ["env.num_envs=0", "1"],
    "agent.batch_size=0": ["agent.batch_size=0", "above 0"],
    "agent.hidden=[]": ["agent.hidden=[]", "[64,64]"],
    "agent.hidden=[64,-1]": ["agent.hidden=[64,-1]", "above 0"],
    "device=tpu": ["device=tpu", "auto, cpu, cuda"],
    "agent=dqn env=pendulum": ["agent=dqn", "Pendulum-v1", "agent=ppo"],
    "agent.gamma=1.5": ["agent.gamma=1.5", "between 0 and 1"],
    "seed=-1": ["seed=-1", "0 or more"],
    "agent.replay.capacity=10": ["agent.replay.capacity=10", "one batch"],
    "experiment=nosuch": ["experiment=nosuch"],
    "experiment=cartpole_dq": ["experiment=cartpole_dq", "cartpole_dqn"],
    "memory.limit_mb=-1": ["memory.limit_mb=-1"],
    "agent=[": ["agent=["],
}

# One process for all cases: it fails too when a refusal has imported torch.
DRIVER = """
import contextlib, io, json, sys
from training.command_line import main

def train(job):
    print("accepted")

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
def answers(tmp_path_factory):
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
def test_is_refused_in_one_clear_line(answers, case):
    code, out, err, torch_was_imported = answers[case]
    assert code == 2, (out, err)
    assert out == ""
    assert len(err.splitlines()) <= 6, err
    assert "Traceback" not in err
    for part in CASES[case]:
        assert part in err, err
    assert not torch_was_imported


@pytest.mark.parametrize("case", ["agent.learning_rat=1", "env=cartpol", "device=cuda"])
def test_the_command_itself(tmp_path, case):
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


def test_help_fits_a_screen(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=python_path(),
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "agent=dqn" in done.stdout
