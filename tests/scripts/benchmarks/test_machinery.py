"""What each piece of machinery is worth is measured with that piece switched off."""

import pkgutil
import subprocess
from unittest import mock

import pytest

from scripts.benchmarks import machinery
from scripts.benchmarks.machinery import PIECES, RUNS, Spent, measured, once, switch_off


@pytest.fixture(autouse=True)
def patches_end():
    yield
    mock.patch.stopall()


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_that_is_switched_off_is_replaced(name):
    piece = PIECES[name]
    assert piece.runs and set(piece.runs) <= set(RUNS)
    switch_off(name)
    for path, instead in piece.replaced.items():
        assert pkgutil.resolve_name(path) is instead


def test_runs_with_and_without_a_piece_alternate(monkeypatch):
    asked = []
    monkeypatch.setattr(machinery, "once", lambda name, _: asked.append(name) or Spent(1, 1, 1))
    for second in (0, 1):
        machinery.turns("a piece", (), second)
    assert asked == ["", "a piece", "a piece", ""]


def test_a_figure_is_the_median_of_ratios_within_rounds():
    pairs = [
        (Spent(3, 2, 110), Spent(2, 1, 100)),
        (Spent(9, 9, 130), Spent(3, 3, 100)),
        (Spent(1, 1, 90), Spent(1, 1, 100)),
    ]
    found = measured("CartPole PPO", "fused rollouts", pairs)
    assert (found["ratio"], found["cpu_ratio"], found["peak_mb"]) == (1.5, 2, 10)
    assert found["seconds"] == 2 and found["rounds"] == 3


@pytest.mark.machinery
@pytest.mark.slow
def test_a_run_without_a_piece_trains():
    spent = once("fused rollouts", (*RUNS["CartPole PPO"], "total_steps=2000"))
    assert spent.seconds > 0 and spent.cpu_seconds > 0 and spent.peak_mb > 100


def test_a_commit_with_changes_beside_the_pages_has_a_plus(tmp_path, monkeypatch):
    def git(*arguments):
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(machinery, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for file in ("code.py", "docs/page.md"):
        (tmp_path / file).write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    clean = machinery.commit()
    assert len(clean) == 7 and int(clean, 16) >= 0
    (tmp_path / "docs" / "page.md").write_text("2")
    assert machinery.commit() == clean
    (tmp_path / "code.py").write_text("2")
    assert machinery.commit() == f"{clean}+"
