"""Texts name the command in the form that the reader typed."""

import sys
from shlex import quote

import pytest

from steadyrl.core.command import typed as typed_command
from steadyrl.core.command.typed import ROOT, as_typed, command_of, install_command

INSTALLED = "/usr/bin/steadyrl"
MODULE = "/site/steadyrl/__main__.py"


@pytest.fixture
def started(monkeypatch):
    """Return a function that sets how this process was started."""
    return lambda first: monkeypatch.setattr(sys, "argv", [first])


TRAIN, EVALUATE = (
    f"python {quote(str(ROOT / program))}" for program in ("train.py", "scripts/evaluate.py")
)


@pytest.mark.parametrize(
    ("first", "train", "evaluate"),
    [
        (INSTALLED, "steadyrl train", "steadyrl evaluate"),
        ("steadyrl plot", "steadyrl train", "steadyrl evaluate"),  # as help shows it
        (MODULE, "python -m steadyrl train", "python -m steadyrl evaluate"),
        ("python -m steadyrl plot", "python -m steadyrl train", "python -m steadyrl evaluate"),
        (
            str(ROOT / "train.py"),
            TRAIN,
            EVALUATE,
        ),
        (
            str(ROOT / "scripts" / "plot.py"),
            TRAIN,
            EVALUATE,
        ),
    ],
)
def test_commands_have_the_form_of_the_one_typed(started, first, train, evaluate):
    started(first)
    assert command_of() == train
    assert command_of("evaluate") == evaluate


@pytest.mark.parametrize("first", ["train.py", "./train.py", "scripts/plot.py"])
def test_a_clones_scripts_are_named_from_where_the_reader_is(started, monkeypatch, first):
    monkeypatch.chdir(ROOT)
    started(first)
    assert command_of() == "python train.py"
    assert command_of("envs") == "python scripts/envs.py"
    monkeypatch.chdir(ROOT / "docs")
    started("../train.py")
    assert command_of("envs") == "python ../scripts/envs.py"


@pytest.mark.parametrize("first", ["/home/me/train.py", "/lib/notebook/__main__.py", "-c", ""])
@pytest.mark.parametrize("installed", [True, False])
def test_other_programs_name_what_is_installed(started, monkeypatch, first, installed):
    started(first)
    version = "1" if installed else None
    monkeypatch.setattr(typed_command, "installed_version", lambda package: version)
    assert command_of() == ("steadyrl train" if installed else "python train.py")


def test_texts_are_rewritten_with_their_columns(started):
    text = (
        "python train.py agent=ppo      another\n"
        "    python scripts/plot.py x y z w v     remark\n"
        "see python train.py\n"
    )
    started(INSTALLED)
    assert as_typed(text) == (
        "steadyrl train agent=ppo       another\n"
        "    steadyrl plot x y z w v              remark\n"
        "see steadyrl train\n"
    )
    started(MODULE)
    assert as_typed(text).splitlines()[0] == "python -m steadyrl train agent=ppo  another"


def test_extras_are_installed_from_a_clone_or_by_name(monkeypatch):
    assert install_command("plot") == 'pip install -e ".[plot]"'
    monkeypatch.setattr(typed_command, "is_clone", lambda: False)
    assert install_command("plot") == 'pip install "steadyrl[plot]"'
