"""Import path of commands: users' modules in the current directory come first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[3])  # of the checkout, or site-packages


def search_callers_directory_first() -> None:
    """Put the current directory first on sys.path, and a checkout's root last.

    A checkout has top-level folders `agents` and `envs`, which would shadow users' modules. Its
    root stays on the path for spawned processes, unless another `steadyrl` is installed.
    """
    rest = [path for path in sys.path if path not in (ROOT, "", os.getcwd())]
    installed = [i for i, path in enumerate(rest) if os.path.isdir(os.path.join(path, "steadyrl"))]
    rest.insert(installed[0] if installed else len(rest), ROOT)
    sys.path[:] = [os.getcwd(), *rest]
