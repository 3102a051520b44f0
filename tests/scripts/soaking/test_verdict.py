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


def test_growth_is_detected_after_the_warm_up_only():
    grows = with_samples(lambda s: s._replace(own=s.own + 2 * s.step))
    assert failed(grows) == ["Σ PSS without mapped files, MB per million steps"]
    assert own_slope(grows.samples) == pytest.approx(2.0, abs=0.01)
    fills = with_samples(lambda s: s._replace(own=min(s.step, 200_000) * 1000))
    assert failed(fills) == []


def test_late_growth_is_detected_by_the_last_tenth():
    late = with_samples(lambda s: s._replace(own=s.own + 100 * max(0, s.step - 850_000)))
    assert abs(own_slope(late.samples)) < 1
    assert failed(late) == ["Σ PSS without mapped files, last tenth against first, MB"]


@pytest.mark.parametrize("field", ["open_files", "threads", "children"])
def test_growing_handles_are_detected(field):
    grown = with_samples(lambda s: s._replace(**{field: 4 + s.step // 100_000}))
    assert failed(grown) == [field.replace("_", " ")]


def test_a_varying_number_of_workers_passes():
    replaced = with_samples(lambda s: s._replace(children=1 + s.step // STEPS % 2))
    assert failed(replaced) == []


def test_the_end_of_a_run_is_not_judged():
    run = steady()
    last = run.samples[-1]
    ending = [last._replace(seconds=last.seconds + i, own=9 * MB, children=0) for i in range(50)]
    fewer = [s._replace(children=s.step // 100_000) for s in run.samples]
    assert failed(run._replace(samples=[*run.samples, *ending])) == []
    assert failed(run._replace(samples=[*fewer, *ending])) == ["children"]


def test_the_warm_up_covers_replay_filling_and_epsilon_decay():
    assert settled_step(steady().logged, 0.2) == 200_000
    assert settled_step(steady().logged, 0.0) == 140_000  # ε
    explores = with_lines(lambda step: {"train/epsilon": 1 - step / 1_250_000})
    fills = with_lines(lambda step: {"memory/replay_fill": min(1.0, step / 500_000)})
    assert settled_step(fills.logged, 0.2) == 420_000
    assert failed(fills) == []
    assert "checked from step" in failed(explores)
    # Full except for reset timesteps, whose number varies for ever.
    full = with_lines(lambda step: {"memory/replay_fill": 0.9 + step % 3 / 25})
    assert settled_step(full.logged, 0.2) == 200_000


def test_slowing_down_is_detected():
    slower = with_lines(lambda step: {SPEED: STEPS * (1 - step / 1e7)})
    assert failed(slower) == ["steps/s, last tenth against first"]
    parts = [part for part in log_intervals(slower.logged) if part.end > 200_000]
    assert speed_change(parts) == pytest.approx(-0.075, abs=0.005)


def test_slower_updates_in_some_intervals_are_detected():
    # Three of four intervals only collect; updates become slower.
    slows = timed(lambda t: 0.2 if t % 4 else 2 + t / 50, cpu=lambda t: 0.1)
    assert failed(slows) == ["steps/s, last tenth against first"]


def test_evaluation_lines_do_not_affect_the_speed():
    evaluated = [{"step": line["step"] - 1, "eval/return_mean": 1.0} for line in steady().logged]
    both = sorted([*evaluated, *steady().logged], key=lambda line: line["step"])
    assert log_intervals(both) == log_intervals(steady().logged)


def test_speed_on_a_shared_machine_is_per_cpu_second():
    waits = timed(lambda t: 1 + t / 20, cpu=lambda t: 0.5)
    assert failed(waits) == ["steps/s, last tenth against first"]
    assert failed(waits, SHARED) == []
    works = timed(lambda t: 1 + t / 20, cpu=lambda t: 0.5 + t / 200)
    (bad,) = (check for check in judge(works, SHARED) if not check.passed)
    assert bad.name.startswith("steps per CPU second") and float(bad.value.rstrip("%")) < -20


@pytest.mark.parametrize("limits", [LIMITS, SHARED])
def test_longer_evaluations_do_not_count_as_slowing_down(limits):
    longer = timed(lambda t: 1.0, cpu=lambda t: 0.9, evaluate=lambda t: t / 30)
    assert failed(longer, limits) == []


def test_failed_and_barely_sampled_runs_are_not_steady():
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


def test_missing_evaluations_and_restarts_fail():
    unseen = [{k: v for k, v in line.items() if "eval" not in k} for line in steady().logged]
    assert failed(steady(logged=unseen)) == ["evaluations"]
    limits = LIMITS._replace(restarts=10)
    assert failed(steady(restarts=9), limits) == ["environments rebuilt"]
    assert failed(steady(restarts=10), limits) == []
