"""The other half of the examples of `test_fuzz.py`."""

import pytest

from tests.test_fuzz import fuzz, quick  # noqa: F401


@pytest.mark.long
def test_every_other_command_runs_or_is_rejected_in_one_line(quick):  # noqa: F811
    fuzz(quick, half=1)
