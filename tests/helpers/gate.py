"""A place where a program waits until a test lets it go on.

A gate is a file in the folder that `GATES` names: who comes to one that the test has locked waits
until it is unlocked. `python gate.py PROGRAM …` runs a program that comes to the gate `torch` when
it imports torch.
"""

import fcntl
import os
import runpy
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


def gate(name):
    path = Path(os.environ["GATES"]) / name
    if path.exists():
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)


class GateOfTorch(MetaPathFinder):
    """Finds nothing; waits where torch is looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            gate("torch")


if __name__ == "__main__":
    sys.meta_path.insert(0, GateOfTorch())
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
