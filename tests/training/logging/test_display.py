"""What a display shows and when, by a clock that is set; its thread draws and ends."""

import gc
import io
import logging
import os
import threading
import weakref
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from rich.console import Console

from steadyrl.core.clock import Activity, doing, report_progress, shown_by
from steadyrl.training.logging.display import Display, Filling, Lines
from steadyrl.training.logging.progress_bar import Bar, LiveConsole
from steadyrl.training.logging.screen import displayed
from steadyrl.training.logging.terminal import Status, Stream

NO_METRICS = "step {} of 1,000 after 0:10 (metrics come every log.every steps)"

log = logging.getLogger("steadyrl")


class Clock:
    """A clock that is set."""

    now = 0.0

    def __call__(self):
        return self.now


class Run:
    """A display, its clock and the lines that it logs."""

    def __init__(self, caplog, kind=Lines, total=1000):
        caplog.set_level(logging.INFO, "steadyrl")
        self._caplog, self.clock = caplog, Clock()
        self.env = SimpleNamespace(running=0.0)
        self.display = kind(total, activity=Activity(self.clock))

    def wait(self, seconds):
        """Let time pass, with a tick every half second."""
        for _ in range(round(2 * seconds)):
            self.clock.now += 0.5
            self.display.tick()

    def step(self, step, updates=0, seconds=0.0):
        self.clock.now += seconds
        self.display.on_steps(step, updates)

    @property
    def lines(self):
        found = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return found


@pytest.fixture
def run(caplog):
    return Run(caplog)


def test_a_phase_that_lasts_has_one_line(run):
    with shown_by(run.display.activity):
        with doing("evaluating (20 episodes)"):
            run.wait(1.5)
            assert run.lines == []
            run.wait(60)
        assert run.lines == ["evaluating (20 episodes) ..."]
        with doing("evaluating (20 episodes)"):
            run.wait(1.5)  # with what came just before, one phase
        run.clock.now += 100
        with doing("evaluating (20 episodes)"):
            run.wait(5)
    assert run.lines == ["evaluating (20 episodes) ..."]


def test_a_phase_inside_another_has_the_line(run):
    with shown_by(run.display.activity), doing("building the agent"):
        run.wait(1)
        with doing("compiling"):
            run.wait(3)
        run.wait(10)
    assert run.lines == ["compiling ..."]


def test_a_phase_with_a_line_of_its_own_gets_none(run):
    with shown_by(run.display.activity), doing("preparing the update", logged=True):
        run.wait(10)
    assert run.lines == []


def test_slow_environments_and_updates_have_one_line_in_a_run(run):
    run.display.begin(0, run.env)
    for step in range(1, 4):
        for run.env.running in (0.5, 1.0, 1.5, 2.0, 2.5):
            run.wait(0.5)
        run.env.running = 0.0
        run.step(step)
    assert run.lines == ["waiting for the environments ..."]
    run.wait(2.5)
    assert run.lines == [
        "updating ...",
        "step 3 of 1,000 after 0:10 (metrics come every log.every steps)",
    ]
    run.wait(20)
    assert run.lines == []


def test_steps_that_go_on_are_not_an_update(run):
    run.display.begin(0, run.env)
    for step in range(100, 120):
        run.step(step)
        run.wait(0.5)
    assert run.lines == ["step 119 of 1,000 after 0:10 (metrics come every log.every steps)"]


def test_after_metrics_no_line_about_their_absence(run):
    run.display.begin(0, run.env)
    run.wait(1)
    run.step(10)
    run.display.show(Status(10, 1.0, None, 0.0))
    assert len(run.lines) == 1
    for step in range(11, 60):
        run.step(step)
        run.wait(0.5)
    assert run.lines == []


def left(run, step):
    run.display.show(Status(step, 1.0, None, 0.0))
    return run.display.texts["left"]


def test_the_time_left_leaves_out_compilation_and_pauses(run):
    """8 steps a second: without the phases, 100 seconds for the last 800 steps."""
    run.display.begin(0, run.env)
    with shown_by(run.display.activity):
        run.step(1)
        left(run, 1)
        with doing("compiling"):
            run.clock.now += 600
        run.step(81, seconds=10)
        assert left(run, 81) == "left 1:55"
        with doing("evaluating"):
            run.clock.now += 3000
            with doing("compiling"):
                run.clock.now += 60
        run.step(161, seconds=10)
        assert left(run, 161) == "left 1:45"
        run.clock.now += 3600  # suspended
        run.step(200, seconds=5)
        assert left(run, 200) == "left 1:40"


def test_the_time_left_falls_with_every_step(run):
    run.display.begin(0, run.env)
    for step in (1, 9):
        run.step(step, seconds=1)
        left(run, step)
    assert run.display.texts["left"] == "left 2:04"
    run.step(601)
    assert run.display.texts["left"] == "left 0:50"


def shown(bar, width=100):
    console = bar._live.console
    with console.capture() as capture:
        console.print(bar)
    return capture.get().split()


@pytest.fixture
def live(caplog):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    return Run(caplog, lambda total, activity: Bar(console, total, "", activity))


def test_a_live_line_says_within_a_second_what_takes_longer(live):
    with shown_by(live.display.activity):
        with doing("building the environments"):
            live.wait(0)
            assert shown(live.display) == []
            live.wait(1)
            assert " ".join(shown(live.display)) == "building the environments 0:01"
            with doing("compiling"):
                live.wait(1)
                assert shown(live.display)[-2:] == ["compiling", "0:01"]
                live.wait(66)
                assert shown(live.display)[-2:] == ["compiling", "1:07"]
        live.display.begin(0, live.env)
        live.wait(1.5)
        assert " ".join(shown(live.display)[-4:]) == "the first step 0:01"
        assert "memory" not in shown(live.display)  # not measured yet
        live.step(20)
        live.wait(0.5)
        assert shown(live.display)[0] == "20" and shown(live.display)[-1] == "-:--"
        live.env.running = 3.0
        assert " ".join(shown(live.display)[-5:]) == "waiting for the environments 0:03"
        live.env.running = 0.0
        live.wait(1)
        assert shown(live.display)[-2:] == ["updating", "0:01"]
        with doing("evaluating (3 episodes)"):
            live.wait(2)
        live.wait(0.5)  # after the evaluation, whose seconds do not count
        assert shown(live.display)[-2:] == ["updating", "0:00"]


@pytest.mark.parametrize("failure", [OSError(5, "gone"), ValueError("closed file")])
def test_a_display_that_cannot_draw_gives_up(failure):
    given_up = threading.Event()

    class Broken(Display):
        ticks = 0

        def draw(self):
            self.ticks += 1
            raise failure

        def give_up(self):
            given_up.set()

    display = Broken(10, "drawing")
    display.start()
    given_up.wait()
    display._thread.join()
    assert display.ticks == 1
    display.close()


def test_the_thread_ends_with_the_run_and_keeps_nothing_alive():
    class Environments:
        running = 0.0

    output, env = io.StringIO(), Environments()
    before = threading.active_count()
    with displayed(Console(file=output, force_terminal=True), 100) as display:
        assert threading.active_count() == before + 1
        display.begin(0, env)
        display.close()
        gone = weakref.ref(env)
        del env
        assert gone() is None
    assert threading.active_count() == before
    gone = weakref.ref(display)
    del display
    gc.collect()
    assert gone() is None


def test_a_silent_display_has_no_thread():
    before = threading.active_count()
    with displayed(Stream(io.StringIO()), 100, silent=True) as display:
        display.begin(0, SimpleNamespace(running=0.0))
        display.on_steps(1, 0)
        display.show(Status(1, 1.0, None, 0.0))
        assert threading.active_count() == before


def test_without_threads_metrics_are_shown(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with displayed(Stream(output := io.StringIO()), 100) as display:
        display.on_steps(50, 0)
        display.show(Status(50, 1.0, None, 0.0))
    assert "step  50  50%" in output.getvalue()


@pytest.mark.parametrize("target", ["full", "unread"])
def test_an_unwritable_terminal_ends_nothing(target):
    reader, handle = os.pipe()
    os.close(reader)
    if target == "full":
        handle = os.open("/dev/full", os.O_WRONLY)
    console = LiveConsole(file=os.fdopen(handle, "w"), force_terminal=True, width=80)
    with console.file, displayed(console, 100) as display:
        display.draw()
        log.info("lost")
        display.show(Status(50, 1.0, None, 0.0))


def text_of(live, width=80):
    live.display._live.console.width = width
    return " ".join(shown(live.display))


METRICS = {
    "time/steps_per_second": 1234.0,
    "rollout/reward_mean": -0.0166667,
    "memory/rss_mb": 200.0,
    "memory/tree_pss_mb": 229.0,
}


def test_the_live_line_says_what_is_filled_then_that_it_learns(live):
    live.display._total = 100_000
    live.display.begin(0, live.env, 0, Filling("replay", 10_000))
    live.step(4120, seconds=1)
    live.display.report(4120, METRICS)
    assert text_of(live) == (
        "4,120 4% reward -0.0167 1,234 steps/s filling the replay 4,120/10,000"
    )
    live.step(10_008, updates=1, seconds=1)
    live.display.report(10_008, METRICS | {"rollout/return_mean": -174.84})
    live.step(20_000, updates=99, seconds=1)
    live.display.report(20_000, METRICS | {"rollout/return_mean": -174.84})
    found = text_of(live)
    assert found == "20,000 20% return -174.8 1,234 steps/s RAM 229 MB left 0:08 learning"


@pytest.mark.parametrize("updates", [0, 9])
def test_a_run_that_has_learned_before_is_learning_when_it_is_resumed(live, updates):
    live.display._total = 100_000
    live.display.begin(50_000, live.env, updates)
    live.step(50_001, updates)
    assert ("learning" in text_of(live)) == (updates > 0)
    live.display.begin(50_001, live.env, updates, Filling("replay", 60_000))  # it was dropped
    live.step(50_002, updates)
    assert "filling the replay 50,002/60,000" in text_of(live)


def test_memory_is_that_of_the_process_tree_and_of_the_card(live):
    """Between two readings of the tree it moves with the memory of this process."""
    live.display._total = 100_000
    cuda = {"memory/cuda_reserved_mb": 1234.0}
    live.display.begin(0, live.env)
    live.display.report(100, METRICS | cuda)
    live.display.report(100, METRICS | {"memory/rss_mb": 250.0, "memory/tree_pss_mb": 1279.0})
    live.display.report(100, {"time/steps_per_second": 1.0, "memory/rss_mb": 260.0})
    assert "RAM 1.29 GB GPU 1.23 GB" in text_of(live)
    live.display.report(100, {"eval/return_mean": 1.0})  # no line of training
    assert "RAM 1.29 GB GPU 1.23 GB" in text_of(live)


@pytest.mark.parametrize("total", [10_000, 1_000_000, 20_000_000])
@pytest.mark.parametrize("what", ["filling", "evaluating", "learning"])
def test_the_live_line_fits_80_columns_and_drops_what_matters_least(live, total, what):
    live.display._total = total
    until = total // 3 if what == "filling" else 0
    live.display.begin(0, live.env, 0, Filling("replay", until))
    live.step(total // 4, updates=what != "filling", seconds=1)
    live.display.report(total // 4, METRICS | {"rollout/return_mean": -1174.8})
    with shown_by(live.display.activity), ExitStack() as evaluating:
        if what == "evaluating":
            evaluating.enter_context(doing("evaluating (20 episodes)"))
            report_progress("7 played")
            live.wait(1)
        console = live.display._live.console
        console.width = 80
        with console.capture() as capture:
            console.print(live.display)
    line = capture.get().rstrip("\n")
    assert len(line) < 80 and ("left " in line) == (what != "filling") and "25%" in line
    assert what in line or (what == "learning" and total > 1e6)
    assert "20 episodes), 7 played 0:01" in line or what != "evaluating"


def test_plain_lines_say_when_learning_begins_instead_of_a_time_left(run):
    run.display._total = 100_000
    run.display.begin(0, run.env, 0, Filling("rollout", 2048))
    run.step(512)
    run.display.report(512, METRICS)
    run.clock.now += 60
    run.step(2048, updates=1)
    run.display.report(2048, METRICS)
    first, second = run.lines
    assert first == (
        "step     512   1%  reward -0.0167   1,234 steps/s  RAM 229 MB  learns at 2,048"
    )
    assert "left" in second and "learns" not in second and max(len(first), len(second)) <= 80
