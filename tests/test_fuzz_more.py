"""The other half of what `test_fuzz.py` tries."""

from tests.test_fuzz import fuzz, quick  # noqa: F401


def test_every_other_command_runs_or_is_refused_in_a_line(quick):  # noqa: F811
    fuzz(quick, half=1)
