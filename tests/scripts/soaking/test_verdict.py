import pytest
from soaked import LIMITS, MB, STEPS, steady, timed, with_lines, with_samples

from scripts.soaking.verdict import (
    SPEED,
    judge,
    log_intervals,
    own_slope,
    settled_step,
    speed_change,
)

SHARED = LIMITS._replace(shared_machine=True)


def failed(soak, limits=LIMITS):
    return [check.name for check in judge(soak, limits) if not check.passed]


def test_a_steady_run_passes_every_check():
    for limits in (LIMITS, SHARED):
        checks = judge(steady(), limits)
        assert len(checks) == 9 and all(check.passed for check in checks)


def test_growth_is_found_and_only_after_the_warm_up():
    grows = with_samples(lambda s: s._replace(own=s.own + 2 * s.step))
    assert failed(grows) == ["Σ PSS without mapped files, MB per million steps"]
    assert own_slope(grows.samples) == pytest.approx(2.0, abs=0.01)
    fills = with_samples(lambda s: s._replace(own=min(s.step, 200_000) * 1000))
    assert failed(fills) == []


def test_growth_that_begins_late_is_found_although_the_slope_is_a_median():
    late = with_samples(lambda s: s._replace(own=s.own + 100 * max(0, s.step - 850_000)))
    assert abs(own_slope(late.samples)) < 1
    assert failed(late) == ["Σ PSS without mapped files, last tenth against first, MB"]


@pytest.mark.parametrize("field", ["open_files", "threads", "children"])
def test_handles_that_become_more_are_found(field):
    grown = with_samples(lambda s: s._replace(**{field: 4 + s.step // 100_000}))
    assert failed(grown) == [field.replace("_", " ")]


def test_processes_that_are_being_replaced_are_no_fewer():
    replaced = with_samples(lambda s: s._replace(children=1 + s.step // STEPS % 2))
    assert failed(replaced) == []


def test_how_a_run_ends_is_not_judged():
    run = steady()
    last = run.samples[-1]
    ending = [last._replace(seconds=last.seconds + i, own=9 * MB, children=0) for i in range(50)]
    fewer = [s._replace(children=s.step // 100_000) for s in run.samples]
    assert failed(run._replace(samples=[*run.samples, *ending])) == []
    assert failed(run._replace(samples=[*fewer, *ending])) == ["children"]


def test_the_warm_up_lasts_until_the_replay_is_full_and_epsilon_at_its_end():
    assert settled_step(steady().logged, 0.2) == 200_000
    assert settled_step(steady().logged, 0.0) == 140_000  # ε
    explores = with_lines(lambda step: {"train/epsilon": 1 - step / 1_250_000})
    fills = with_lines(lambda step: {"memory/replay_fill": min(1.0, step / 500_000)})
    assert settled_step(fills.logged, 0.2) == 420_000
    assert failed(fills) == []
    assert "checked from step" in failed(explores)
    # Full, but for the rows that only end an episode: their number changes for ever.
    full = with_lines(lambda step: {"memory/replay_fill": 0.9 + step % 3 / 25})
    assert settled_step(full.logged, 0.2) == 200_000


def test_a_run_that_slows_down_is_found():
    slower = with_lines(lambda step: {SPEED: STEPS * (1 - step / 1e7)})
    assert failed(slower) == ["steps/s, last tenth against first"]
    parts = [part for part in log_intervals(slower.logged) if part.end > 200_000]
    assert speed_change(parts) == pytest.approx(-0.075, abs=0.005)


def test_learning_that_is_not_in_every_interval_counts_all_the_same():
    # Three intervals in four only collect; learning becomes half as fast again.
    slows = timed(lambda t: 0.2 if t % 4 else 2 + t / 50, cpu=lambda t: 0.1)
    assert failed(slows) == ["steps/s, last tenth against first"]


def test_lines_of_evaluations_alone_say_nothing_of_the_speed():
    evaluated = [{"step": line["step"] - 1, "eval/return_mean": 1.0} for line in steady().logged]
    both = sorted([*evaluated, *steady().logged], key=lambda line: line["step"])
    assert log_intervals(both) == log_intervals(steady().logged)


def test_on_a_shared_machine_speed_is_counted_in_cpu_seconds():
    waits = timed(lambda t: 1 + t / 20, cpu=lambda t: 0.5)
    assert failed(waits) == ["steps/s, last tenth against first"]
    assert failed(waits, SHARED) == []
    works = timed(lambda t: 1 + t / 20, cpu=lambda t: 0.5 + t / 200)
    (bad,) = (check for check in judge(works, SHARED) if not check.passed)
    assert bad.name.startswith("steps per CPU second") and float(bad.value.rstrip("%")) < -20


@pytest.mark.parametrize("limits", [LIMITS, SHARED])
def test_evaluations_that_take_longer_are_no_slower_training(limits):
    longer = timed(lambda t: 1.0, cpu=lambda t: 0.9, evaluate=lambda t: t / 30)
    assert failed(longer, limits) == []


def test_a_run_that_fails_or_was_hardly_seen_is_not_steady():
    assert failed(steady(exit_code=7)) == ["exit code"]
    assert failed(steady(samples=steady().samples[-12:])) == []
    assert failed(steady(samples=steady().samples[-11:])) == []
    assert failed(steady(samples=steady().samples[-10:])) == ["samples after the warm-up"]
    assert failed(steady(logged=[], samples=[], exit_code=1)) == [
        "exit code",
        "evaluations",
        "samples after the warm-up",
        "log lines after the warm-up",
    ]


def test_a_run_without_a_log_is_not_steady():
    silent = [sample._replace(step=0) for sample in steady().samples]
    assert "log lines after the warm-up" in failed(steady(logged=[], samples=silent))


def test_what_was_to_happen_must_have_happened():
    unseen = [{k: v for k, v in line.items() if "eval" not in k} for line in steady().logged]
    assert failed(steady(logged=unseen)) == ["evaluations"]
    asked = LIMITS._replace(restarts=10)
    assert failed(steady(restarts=9), asked) == ["environments rebuilt"]
    assert failed(steady(restarts=10), asked) == []
