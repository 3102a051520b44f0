"""`steadyrl completion`: programs, keys and presets, in a real bash."""

import subprocess
import sys

import pytest
from command import ROOT, environment

from steadyrl.training.cli.shell.completion import BASH, choices, main


def test_programs_and_keys_are_offered_first():
    assert choices("steadyrl ev") == ["evaluate ", "eval."]
    assert choices("steadyrl trai") == ["train "]
    assert {"train ", "doctor ", "envs "} < set(choices("steadyrl "))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("steadyrl agent.replay.cap", ["agent.replay.capacity="]),
        ("steadyrl train agent.replay.cap", ["agent.replay.capacity="]),
        ("steadyrl train agent=ppo agent.cli", ["agent.clip=", "agent.clip_value="]),
        ("steadyrl -m env=mounta", ["env=mountaincar", "env=mountaincar_continuous"]),
        ("steadyrl envs check taxi", ["taxi "]),
        ("steadyrl evaluate outp", []),  # the shell's: a file
        ("steadyrl train no_such_key.x", []),
        ("steadyrl train --config-dir /no/such/folder env=car", []),
    ],
)
def test_keys_and_presets_are_completed(line, expected, capsys):
    found = choices(line)
    assert [each for each in expected if not any(f.startswith(each) for f in found)] == []
    assert bool(found) is bool(expected)
    assert capsys.readouterr().out == ""


def test_presets_of_another_folder_are_completed(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine.yaml").write_text("id: CartPole-v1\n")
    assert choices(f"steadyrl --config-dir {tmp_path} env=min")[-1:] == ["env=mine"]
    assert choices(f"steadyrl --config-dir={tmp_path} env=mine") == ["env=mine"]


ASK = r"""
steadyrl() { python_of_tests -m steadyrl "$@"; }
python_of_tests() { "$PYTHON" "$@"; }
%s
COMP_LINE="$1"; COMP_POINT=${#1}; %s
_steadyrl
printf '%%s\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "breaks", "expected"),
    [
        ("steadyrl doc", "", ["doctor "]),
        ("steadyrl env=taxi", "COMP_WORDBREAKS=$' \\n='", ["taxi"]),  # bash has replaced `env=`
        ("steadyrl env=taxi", "COMP_WORDBREAKS=' '", ["env=taxi"]),
    ],
)
def test_bash_replaces_the_last_word(line, breaks, expected):
    done = subprocess.run(
        ["bash", "-c", ASK % (BASH, breaks), "bash", line],
        capture_output=True,
        text=True,
        env=environment() | {"PYTHON": sys.executable},
        cwd=ROOT,
    )
    assert done.stdout.splitlines() == expected, done.stderr


def test_the_script_is_printed(capsys):
    main(["bash"])
    assert capsys.readouterr().out == BASH
