"""`python scripts/completion.py` is `steadyrl completion`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from steadyrl.command import run

if __name__ == "__main__":
    run("completion")
