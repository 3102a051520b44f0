"""Synthetic results of soak tests."""

from scripts.soaking.sampling import Sample, Soak
from scripts.soaking.verdict import Limits

LIMITS = Limits(slope_mb=1.0, growth_mb=5.0, speed_change=0.05, warmup=0.2, shared_machine=False)
MB = 1_000_000
STEPS = 10_000  # between two log lines


def steady(intervals=100, **changes):
    """Return a run of a million steps that passes all checks."""
    plain = {
        "title": "dqn on cartpole",
        "command": ["train.py", "agent=dqn"],
        "exit_code": 0,
        "samples": [
            Sample(t, STEPS * t, 600 * MB, 500 * MB + t % 3, 0.9 * t, 20, 4, 2)
            for t in range(intervals + 1)
        ],
        "logged": [
            {
                "step": STEPS * t,
                "time/steps_per_second": STEPS * (1 + t % 7 / 1000),
                "eval/return_mean": 500.0,
                "memory/replay_fill": min(1.0, t / 10),
                "train/epsilon": max(0.05, 1 - t / 15),
            }
            for t in range(1, intervals + 1)
        ],
    }
    return Soak(**(plain | changes))


def with_samples(change):
    """Return a steady run with changed samples."""
    return steady(samples=[change(sample) for sample in steady().samples])


def with_lines(change):
    """Return a steady run with changed log lines."""
    return steady(logged=[line | change(line["step"]) for line in steady().logged])


def timed(train, cpu, evaluate=lambda t: 0.0):
    """Return a run with given training, CPU and evaluation seconds per interval."""
    run = steady()
    seconds = spent = 0.0
    samples, logged = [run.samples[0]], []
    for sample, line in zip(run.samples[1:], run.logged, strict=True):
        t = sample.step // STEPS
        fraction = cpu(t) / train(t)
        seconds += train(t) + evaluate(t)
        spent += fraction * (train(t) + evaluate(t))
        samples.append(sample._replace(seconds=seconds, cpu_seconds=spent))
        logged.append(line | {"time/steps_per_second": STEPS / train(t)})
    return run._replace(samples=samples, logged=logged)
