"""Phases that a display reads: their seconds, nesting, and what does not count."""

import threading

import pytest

from steadyrl.core.clock import Activity, doing, shown_by


class Clock:
    """A clock that is set."""

    now = 100.0

    def __call__(self):
        return self.now


def activity():
    return Activity(Clock())


def test_phases_nest_and_their_seconds_count_once():
    found = activity()
    with shown_by(found):
        with doing("building"):
            found.clock.now += 2
            with doing("compiling", logged=True):
                found.clock.now += 3
                assert [(p.what, p.begun, p.logged) for p in found.phases] == [
                    ("building", 100.0, False),
                    ("compiling", 102.0, True),
                ]
                assert found.seconds == 5
            assert [p.what for p in found.phases] == ["building"]
        found.clock.now += 10
        with doing("evaluating"):
            found.clock.now += 1
    assert (found.phases, found.seconds) == ((), 6)


def test_a_phase_that_fails_ends():
    found = activity()
    with pytest.raises(KeyError), shown_by(found), doing("building"):
        raise KeyError
    assert found.phases == ()


def test_the_same_phase_soon_after_goes_on():
    found = activity()
    with shown_by(found):
        for pause, begun in ((0.0, 100.0), (0.5, 100.0), (2.0, 107.5)):
            found.clock.now += pause
            with doing("compiling"):
                assert found.phases[0].begun == begun
                found.clock.now += 2.5
    assert found.seconds == 7.5  # the pauses between do not count


def test_phases_belong_to_the_thread_of_the_display():
    found = activity()

    def elsewhere():
        with doing("writing"):
            seen.append(found.phases)

    seen = []
    with doing("alone"):  # no display: nothing happens
        assert found.phases == ()
    with shown_by(found):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == [()]
    with doing("after"):
        assert found.phases == ()


def test_compilation_is_one_phase_that_says_whether_the_code_is_kept(tmp_path, monkeypatch):
    from numba import njit

    from steadyrl.core import jit

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jit.settings, "CACHE_DIR", str(tmp_path))
    seen = []

    class Recorded(Activity):
        def begin(self, what, *, logged=False):
            seen.append(what)
            super().begin(what, logged=logged)

    kept = jit.jit(_twice_more)
    inner = njit(lambda x: x + 1)
    plain = njit(lambda x: inner(x) * 2)  # compiles two functions
    with shown_by(Recorded()), jit.compilation_as_phase():
        assert kept(2) == 5 and kept(3) == 7  # compiled once
        assert plain(2) == 6
    plain(2.5)  # nobody listens any more
    assert seen == [
        "compiling machine code (kept for the next run)",
        "compiling machine code (again in every run)",
    ]


def _twice_more(x):
    return 2 * x + 1
