"""No text of the program names a command by itself: `core/command/typed.py` decides its form."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("core", "memory", "buffers", "envs", "agents", "training", "steadyrl")
NAMED = ("python train.py", "python scripts/", "pip install -e")
# Texts that `as_typed` rewrites, and the function itself.
ALLOWED = {
    "training/cli/arguments.py": 1,
    "training/cli/programs.py": 1,
    "core/command/typed.py": 1,
}


def named(text):
    """Return the lines of strings that name a command, docstrings apart."""
    tree = ast.parse(text)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return sorted(
        {
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and any(each in node.value for each in NAMED)
        }
    )


def test_texts_take_the_form_of_the_command_that_was_typed():
    files = {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_symlink()
    }
    assert len(files) > 200
    found = {name: named(text) for name, text in files.items()}
    wrong = {name: lines for name, lines in found.items() if len(lines) > ALLOWED.get(name, 0)}
    assert wrong == {}, "command_of(), as_typed() or install_command() of core/command/typed.py"
    assert all(found[name] for name in ALLOWED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('say(f"resume: python train.py {words}")', [1]),
        ('"""Train: python train.py"""\nx = "train.py"', []),
        ('def f():\n    """python train.py"""\n    return "pip install -e"', [3]),
    ],
)
def test_planted_texts_are_found(text, expected):
    assert named(text) == expected
