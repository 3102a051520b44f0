import numpy as np
import pytest

from steadyrl.training.analysis.estimates import (
    interquartile_mean,
    interval,
    mean,
    probability_of_improvement,
    widening,
)
from steadyrl.training.evaluation.t_distribution import STUDENT, t_quantile


def test_interquartile_mean_trims_a_quarter_at_each_end():
    runs = np.array([1000.0, 3.0, 1.0, 2.0, 5.0, -1000.0, 4.0, 6.0])
    assert interquartile_mean(runs) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert interquartile_mean(runs[:3]) == runs[:3].mean()  # of three runs none is trimmed


def test_the_interval_of_one_run_has_zero_width():
    low, high = interval(np.array([[5.0, 7.0]]), mean)
    assert low.tolist() == high.tolist() == [5.0, 7.0]


def test_equal_runs_have_an_interval_of_zero_width():
    low, high = interval(np.full((5, 3), 7.0), mean)
    assert low.tolist() == high.tolist() == [7.0] * 3


def test_the_bootstrap_resamples_runs_independently_of_chunk_size(monkeypatch):
    values = np.random.default_rng(1).normal(size=(4, 10))
    at_once = interval(values, mean)
    monkeypatch.setattr("steadyrl.training.analysis.estimates.AT_ONCE", 2000 * 4 * 3)
    np.testing.assert_array_equal(np.array(interval(values, mean)), np.array(at_once))
    # Runs are resampled, not points: copies of a point have the same interval.
    low, _ = interval(np.repeat(values[:, :1], 5, axis=1), mean)
    assert len(set(low.tolist())) == 1


def test_the_interval_of_many_runs_is_the_percentile_bootstrap():
    values = np.random.default_rng(2).normal(size=400)
    low, high = interval(values, mean)
    half = 1.96 * values.std() / np.sqrt(400)
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)


def test_intervals_are_widened_by_students_t_for_few_runs():
    assert widening(3) == pytest.approx(STUDENT[1] / 1.959964 * np.sqrt(3 / 2))
    # The table and the series expansion agree where they meet.
    assert widening(10) > widening(11) > 1
    assert widening(11) == pytest.approx(2.228 / 1.96 * np.sqrt(11 / 10), rel=2e-3)
    assert widening(1_000_000) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("runs", [3, 5, 10])
@pytest.mark.parametrize("estimator", [mean, interquartile_mean])
def test_95_percent_intervals_cover_the_truth_95_percent_of_times(runs, estimator):
    """The plain percentile bootstrap of three seeds would cover it 73 times."""
    trials = 1000
    values = np.random.default_rng(runs).normal(size=(runs, trials))
    # Trials are columns, like points of a curve; they share the resampling only.
    low, high = interval(values, estimator)
    covered = float(((low <= 0) & (high >= 0)).mean())
    assert 0.92 <= covered <= 0.99


def test_probability_of_improvement_counts_pairs():
    ours, theirs = np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.0])
    probability, (low, high) = probability_of_improvement(ours, theirs)
    assert probability == pytest.approx((0 + 0.5 + 1 + 1 + 1 + 1) / 6)  # one tie
    assert 0 <= low < probability < high <= 1
    assert probability_of_improvement(theirs, ours)[0] == pytest.approx(1 - probability)
    certain = probability_of_improvement(ours + 10, theirs)
    assert certain[0] == certain[1].low == certain[1].high == 1.0


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (9, 2.262), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def test_students_t_quantiles_equal_tables(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-4)
