"""Commands shown in the docs, parsed as a shell would."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
INLINE = re.compile(r"`((?:python|steadyrl|pytest|tensorboard) [^`]+)`")
SHELL = ("bash", "sh")
# In a block without a language, lines that start with these are commands.
PROGRAMS = ("python", "python3", "pip", "steadyrl", "tensorboard", "pytest", "ruff", "mypy")
# Placeholders of the docs.
PLACEHOLDERS = {
    "RUN": "outputs/run",
    "DIR": "outputs/another",
    "PRESET": "cartpole_dqn",
    "experiment=NAME": "experiment=cartpole_dqn",
    "SEED": "0",
    "ID": "CartPole-v1",
    "<name>": "cartpole",
    "<algo>": "dqn",
    "$seed": "0",
    "$n": "3",
    "$p": "true",
    "$coef": "1",
    "<run>": "run",
    '"$@"': "agent=ppo",
}


class Command(NamedTuple):
    """One command of a page: program and arguments."""

    page: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The command line."""
        return shlex.join(self.words)


def pages():
    """Return every page, the README first."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands():
    """Return every distinct command, with the first page that has it."""
    found = {}
    for page in pages():
        for words in commands_of(page.read_text()):
            found.setdefault(words, page.name)
    return [Command(page, words) for words, page in found.items()]


def commands_of(text):
    """Return the words of each command of a page."""
    parts = [part for line in lines(text) for part in re.split(r"&&|;", shown(line))]
    return [words for words in map(read, parts) if words]


def lines(text):
    """Yield the command lines of a page, in code blocks and inline."""
    for language, body in BLOCK.findall(text):
        for line in re.sub(r"\\\n\s*", "", body).splitlines():
            if language in SHELL or (not language and line.startswith(PROGRAMS)):
                yield line
    for inside in INLINE.findall(BLOCK.sub("", text)):
        yield " ".join(inside.split())


def shown(line):
    """Return a line without its comment."""
    return re.split(r"\s+# |\s{3,}", line.strip())[0]


def read(text):
    """Return the words of a command, without loop syntax, taskset and variables."""
    text = re.sub(r"^(\s*(do|done|for \w+ in [^;]*)(?=\s|$))+\s*", "", text)
    for placeholder, value in PLACEHOLDERS.items():
        text = re.sub(rf"(?<![\w.]){re.escape(placeholder)}(?![\w.])", value, text)
    words = [word for word in shlex.split(text) if not word.endswith("…")]
    while words and (words[0] in ("taskset", "-c", "0") or re.match(r"[A-Z_]+=", words[0])):
        del words[0]
    return tuple(words)
