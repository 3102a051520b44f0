"""`steadyrl completion`: programs, keys and presets, in a real bash."""

import shutil
import subprocess
import sys

import pytest
from command import ROOT, environment

from steadyrl.training.cli.shell.completion import BASH, FISH, SCRIPTS, ZSH, choices, main


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
        ("steadyrl train 'seeds=[0,1]' agent.replay.cap", ["agent.replay.capacity="]),
        ("steadyrl train --cfg job agent.replay.cap", ["agent.replay.capacity="]),
        ("steadyrl train 'seeds=[0, agent.replay.cap", []),  # a quote that is open
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


IN_ZSH = r"""
steadyrl() { "$PYTHON" -m steadyrl "$@"; }
compdef() { }
compadd() { shift 4; printf '%%s\n' "$@"; }
_files() { echo files; }
%s
words=(${=1}); CURRENT=$#words; PREFIX=$words[-1]
_steadyrl
"""

IN_FISH = r"""
function steadyrl; $PYTHON -m steadyrl $argv; end
%s
complete -C "$argv[1]"
"""


@pytest.mark.parametrize(("shell", "ask"), [("zsh", IN_ZSH % ZSH), ("fish", IN_FISH % FISH)])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("steadyrl doc", ["doctor"]),
        ("steadyrl train agent.replay.cap", ["agent.replay.capacity="]),
        ("steadyrl env=taxi", ["env=taxi"]),
    ],
)
def test_other_shells_replace_the_last_word(shell, ask, line, expected):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    before = [] if shell == "fish" else ["-f"]  # no start-up files
    done = subprocess.run(
        [shell, *before, "-c", ask, *([shell] if before else []), line],
        capture_output=True,
        text=True,
        env=environment() | {"PYTHON": sys.executable},
        cwd=ROOT,
    )
    found = [each.strip() for each in done.stdout.splitlines()]
    # Fish also offers files: here the folder docs/.
    assert [each for each in found if not each.endswith("/")] == expected, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_ask_the_same_program(shell):
    assert 'steadyrl completion query "$line"' in BASH
    asked = {"zsh": '"$line"', "fish": "(commandline -cp)"}[shell]
    assert f"steadyrl completion query {asked} 2>/dev/null" in SCRIPTS[shell]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_printed(shell, capsys):
    main([shell])
    assert capsys.readouterr().out == SCRIPTS[shell]
