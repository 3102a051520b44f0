"""The progress line and the table of a sweep."""

from steadyrl.training.sweeps.jobs import SweepJob
from steadyrl.training.sweeps.progress import progress_line, table


def test_the_progress_line_shows_counts_best_and_time_left():
    def job(status, score=None):
        return SweepJob("n", "a=1", [], "", "", status=status, score=score, seconds=60.0)

    jobs = [job("finished", 3.0), job("killed"), job("running"), job("waiting"), job("waiting")]
    assert progress_line(jobs, at_once=2) == (
        "sweep: 1/5 done, 1 running, 1 failed, best 3.0 (a=1), about 0:01:30 left"
    )


def test_the_last_jobs_of_many_at_once_take_as_long_as_one():
    jobs = [SweepJob("n", "", [], "", "", status="finished", seconds=60.0)] * 7
    jobs += [SweepJob("n", "", [], "", "", status="running")]
    assert progress_line(jobs, at_once=4).endswith("about 0:01:00 left")


def test_a_best_score_of_0_beats_negative_scores():
    jobs = [SweepJob("n", f"a={at}", [], "", "", status="finished", score=score, seconds=1.0)
            for at, score in enumerate((-2.0, 0.0, -1.0))]  # fmt: skip
    assert "best 0.0 (a=1)" in progress_line(jobs)


def test_small_scores_keep_their_digits():
    jobs = [SweepJob("n", "a=1", [], "", "", status="finished", score=0.0123, seconds=1.0)]
    assert "best 0.0123 (a=1)" in progress_line(jobs) and "  0.0123  " in table(jobs)
