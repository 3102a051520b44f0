"""Where a user's modules are looked for: first in the directory that a command is called from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[3])  # of the checkout, or where packages are installed


def search_callers_directory_first() -> None:
    """Find users' modules in the current directory, and before a checkout's folders of that name.

    A checkout has folders called `agents` and `envs` at its top. It stays on the path, for
    processes that are started anew, but behind all where no other `steadyrl` is installed.
    """
    rest = [path for path in sys.path if path not in (ROOT, "", os.getcwd())]
    installed = [i for i, path in enumerate(rest) if os.path.isdir(os.path.join(path, "steadyrl"))]
    rest.insert(installed[0] if installed else len(rest), ROOT)
    sys.path[:] = [os.getcwd(), *rest]
