"""Wrong arguments of every program: one line, with the nearest argument that there is."""

import shlex
import sys

import pytest

from steadyrl.command import command
from steadyrl.training.cli.programs import PROGRAMS


@pytest.fixture
def refused(monkeypatch, capsys):
    """Return a function that runs a wrong command, and returns the one line of its refusal."""

    def run(line):
        monkeypatch.setattr(sys, "argv", ["/usr/bin/steadyrl", *shlex.split(line)])
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == 2
        text = capsys.readouterr()
        assert not text.out
        (only,) = text.err.splitlines()
        return only

    return run


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unknown_option_is_refused_in_one_line(refused, name):
    needed = {"checkpoint": "list RUN", "completion": "bash", "envs": ""}.get(name, "RUN")
    line = refused(f"{name} {needed if name != 'doctor' else ''} --qqqq=3")
    assert line.startswith("error: --qqqq: no such option; ")
    assert any(hint in line for hint in ("there are: --", "see --help"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plot RUN --tags x", "--tags: no such option; did you mean --tag?"),
        ("plot RUN --x stps", "--x=stps: did you mean steps?"),
        ("plot RUN --estimator median", "--estimator=median: did you mean mean?"),
        ("compare RUN --sort foo", "--sort=foo: there are: group, seeds, score, "),
        ("compare RUN --threshold abc", "--threshold=abc: is no float; see --help"),
        ("compare RUN --csv --json", "--json: not allowed with argument --csv; see --help"),
        ("report", "RUN is missing; see --help"),
        ("report RUN --ot x", "--ot: no such option; did you mean --out?"),
        ("checkpoint lst RUN", "lst: no such command; did you mean list?"),
        ("checkpoint RUN", "RUN: no such command; there are: list, show, verify, export"),
        ("checkpoint export RUN --onx x", "--onx: no such option; did you mean --onnx?"),
        ("checkpoint export RUN", "needs --out FILE or --onnx FILE; see --help"),
        ("export RUN", "needs --out FILE or --onnx FILE; see --help"),
        ("export RUN --output x", "--output: no such option; did you mean --out?"),
        ("record RUN --out", "--out: needs a value; see --help"),
        ("record RUN --n-eval-episodes 4", "--n-eval-episodes: no such option; write --episodes N"),
        ("envs chek X", "chek: no such command; did you mean check?"),
        ("envs check X --jsn", "--jsn: no such option; did you mean --json?"),
        ("evaluate RUN env.id=my:E-v0", "env.id=my:E-v0: write --env id=my:E-v0; see --help"),
        ("evaluate RUN eval.episodes=3", "eval.episodes=3: write --episodes 3; see --help"),
        ("evaluate RUN seed=3", "seed=3: write --seed 3; see --help"),
        ("evaluate RUN agent.gamma=0.9", "agent.gamma=0.9: unexpected; see --help"),
        ("evaluate RUN --episode=3", "--episode: no such option; did you mean --episodes?"),
        ("doctor RUN", "RUN: unexpected; see --help"),
        ("tune a.yaml b.yaml", "b.yaml: unexpected; see --help"),
        ("train --cfg jobs", "--cfg=jobs: did you mean job?"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_nearest(refused, line, said):
    assert refused(line).startswith(f"error: {said}")


def test_options_are_not_guessed_from_their_beginnings(refused):
    assert "did you mean --estimator?" in refused("plot RUN --estimat iqm")
