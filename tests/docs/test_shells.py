"""Every command of the pages means in bash and in zsh what it says: it can be pasted."""

import os
import re
import shlex
import subprocess

import pytest
from documented import BLOCK, ROOT, SHELL, commands_of, pages, read

# Writes its name and its arguments to a file instead of doing anything.
RECORDER = """#!/bin/bash
{ printf '%s\\0' "${0##*/}" "$@"; echo; } >> "$RECORDED"
"""
BUILTIN = ("export", "set", "eval", "source", ".")
# {beginning of blocks whose commands come from other commands: reason}.
NESTED = {
    "#!/bin/bash": "a job of Slurm; tests/training/distributed/test_torchrun.py starts its command",
    "eval ": "tests/training/cli/shell/test_completion.py completes in real shells",
}


def scripts():
    """Return the code of every block of shell commands, with its page."""
    return [
        pytest.param(body, id=f"{page.name}: {body.splitlines()[0][:60]}")
        for page in pages()
        for language, body in BLOCK.findall(page.read_text())
        if language in SHELL
    ]


@pytest.fixture
def started(tmp_path):
    """Return a function that runs a block in bash; it returns the commands started, as words."""
    programs = {words[0] for page in pages() for words in commands_of(page.read_text())}
    for name in programs - {*BUILTIN, "grep"}:
        path = tmp_path / (name if "/" in name else f"bin/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RECORDER)
        path.chmod(0o755)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    record = tmp_path / "recorded"
    search = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    def run(code):
        record.write_text("")
        done = subprocess.run(
            ["bash", "-e", "-c", code], cwd=tmp_path, capture_output=True, text=True,
            env={"PATH": search, "RECORDED": str(record)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [tuple(line.split("\0")[:-1]) for line in record.read_text().splitlines()]

    return run


@pytest.mark.parametrize("code", scripts())
def test_bash_starts_the_commands_that_are_tested(started, code):
    if code.startswith(tuple(NESTED)):
        return
    tested = commands_of(f"```bash\n{code}```\n")
    found = {without_values(read(shlex.join(words))) for words in started(code)}
    assert found == {without_values(w) for w in tested if w[0].rpartition("/")[2] not in BUILTIN}


def without_values(words):
    """Return a command as its program and the keys of its arguments: loops change values."""
    program = words[0].rpartition("/")[2]
    return program, *(word.partition("=")[0] for word in words[1:])


@pytest.mark.parametrize("code", scripts())
def test_blocks_can_be_pasted(code):
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [word for line in code.splitlines() for word in expanded(line)] == []


def expanded(line):
    """Return the words of a line that zsh would expand, or refuse, because they are not quoted."""
    line = re.sub(r"(^|\s)#.*", "", line)
    bare = re.sub(r"\\\\.|'[^']*'|\"[^\"]*\"|\$\([^)]*\)|\$\{[^}]*\}", "", line)
    found = [word for word in bare.split() if re.search(r"[][*?(){}]|^=", word)]
    return [word for word in found if not list(ROOT.glob(word.strip("=/") or "-"))]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("steadyrl train -m seed=range(8)", ["seed=range(8)"]),
        ("steadyrl train agent.hidden=[64]", ["agent.hidden=[64]"]),
        ("steadyrl train 'agent.hidden=[64]' \"seeds=[0]\" x=$n", []),
        ("steadyrl plot runs/*", ["runs/*"]),
        ("steadyrl train seed=0     # why (not)", []),
    ],
)
def test_unquoted_words_are_found(line, words):
    assert expanded(line) == words


def test_bash_rejects_what_is_not_quoted():
    done = subprocess.run(["bash", "-n"], input="x seed=range(8)\n", capture_output=True, text=True)
    assert done.returncode != 0
    assert shlex.split("x 'seed=range(8)'")[1] == "seed=range(8)"
