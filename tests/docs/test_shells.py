"""Every command of the pages means in bash and in zsh what it says: it can be pasted."""

import re
import shlex
import subprocess

import pytest
from documented import BLOCK, ROOT, SHELL, pages


def scripts():
    """Yield (page, code) of every block of shell commands."""
    for page in pages():
        for language, body in BLOCK.findall(page.read_text()):
            if language in SHELL:
                yield pytest.param(body, id=f"{page.name}: {body.splitlines()[0][:60]}")


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
