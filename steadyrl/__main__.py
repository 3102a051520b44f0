"""`python -m steadyrl`, or `python PATH/TO/steadyrl`, is the command `steadyrl`."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent

if sys.path[0] == str(FOLDER):  # started by its path: only the package itself is to be found there
    sys.path[0] = str(FOLDER.parent)

from steadyrl.command import command  # noqa: E402

if __name__ == "__main__":
    command()
