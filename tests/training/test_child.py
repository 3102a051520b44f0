"""A run in a process of its own tells its parent how it went."""

import os
import subprocess
import time

from command import QUICK

from training.child import Child
from training.run_directory import SUMMARY


def begun(directory, *overrides):
    return Child([*QUICK, *overrides], directory, output=subprocess.DEVNULL)


def test_a_score_is_that_of_this_attempt_whatever_clocks_say(tmp_path):
    child = begun(tmp_path / "run", "total_steps=300", "eval.every=300")
    child.process.wait()
    hour_ago = time.time() - 3600  # by the clock of another machine, or of this one set back
    os.utime(tmp_path / "run" / SUMMARY, (hour_ago, hour_ago))
    first = child.wait()
    assert first.status == "finished" and first.score is not None
    os.utime(tmp_path / "run" / SUMMARY)
    refused = begun(tmp_path / "run", "total_steps=300", "eval.every=300", "seed=7").wait()
    assert (refused.exit_code, refused.score) == (2, None)
