"""Runs that start side by side spread over the cards of a machine and share what they must."""

import subprocess
import sys
from contextlib import ExitStack

import pytest

from steadyrl.memory.gpu.cards import AT_ONCE, VISIBLE, runs_per_card, taken_card
from steadyrl.memory.gpu.limit import memory_per_run

TAKE = """
import sys
from steadyrl.memory.gpu.cards import taken_card
with taken_card(int(sys.argv[1])) as card:
    print(card, flush=True)
    sys.stdin.read()
"""
GB = 10**9


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv(AT_ONCE, "4")
    monkeypatch.delenv(VISIBLE, raising=False)


def started(cards):
    """Start a process that takes a card until its input ends; return it and its card."""
    pipe = subprocess.PIPE
    run = subprocess.Popen(
        [sys.executable, "-c", TAKE, str(cards)], stdin=pipe, stdout=pipe, text=True
    )
    return run, int(run.stdout.readline())


def test_runs_spread_over_the_cards_and_a_killed_one_frees_its_own(request):
    runs = [started(2) for _ in range(4)]
    for run, _ in runs:
        request.addfinalizer(run.communicate)
    assert [card for _, card in runs] == [0, 1, 0, 1]
    killed, card = runs[1]
    killed.kill()
    killed.wait()
    again, its = started(2)
    request.addfinalizer(again.communicate)
    assert its == card == 1
    for more in range(2):  # more runs than were announced are not refused
        extra, its = started(2)
        request.addfinalizer(extra.communicate)
        assert its in (0, 1), more


def test_visible_cards_are_told_apart_by_their_names(monkeypatch, request):
    monkeypatch.setenv(VISIBLE, "2,3")
    first, card = started(2)
    request.addfinalizer(first.communicate)
    assert card == 0
    monkeypatch.setenv(VISIBLE, "3,2")  # the same cards in another order
    with taken_card(2) as other:
        assert other == 0  # card 3, as the other run has card 2
    monkeypatch.setenv(VISIBLE, "2,5")
    with taken_card(2) as other:
        assert other == 1


def test_a_single_card_needs_no_lock(tmp_path):
    with ExitStack() as stack:
        assert [stack.enter_context(taken_card(1)) for _ in range(3)] == [0, 0, 0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("runs", "cards", "each"), [("4", 1, 4), ("4", 2, 2), ("3", 2, 2), ("1", 1, 1), ("x", 1, 1)]
)
def test_runs_share_a_card_only_if_there_are_more_than_cards(monkeypatch, runs, cards, each):
    monkeypatch.setenv(AT_ONCE, runs)
    assert runs_per_card(cards) == each


def test_shares_leave_room_for_the_drivers_contexts():
    assert memory_per_run(80 * GB, 4) == 20 * GB - 600_000_000
    assert memory_per_run(2 * GB, 4) == GB // 4
