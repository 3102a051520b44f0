"""Runs that save whenever a save is due."""

import contextlib

import pytest

from steadyrl.training.checkpoints.saver import Saver


@contextlib.contextmanager
def unhurried_saves():
    """Leave out no save in this block because another one is still being written."""
    after_step = Saver.after_step

    def wait_first(self, *args, **kwargs):
        self.checkpoints.wait()
        after_step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Saver, "after_step", wait_first)
        yield
