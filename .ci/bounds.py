"""Print what pyproject.toml admits: bounds.py oldest | pythons.

oldest: the lower bound of each dependency, as pip reads it, one a line. pythons: each minor version
of Python and the program that is it here; nothing follows a version that is missing.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import which

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
NEWEST_MINOR = 15  # beyond what is out: those are listed as missing
PROBE = "import sys; print('%d.%d' % sys.version_info[:2])"


def oldest() -> list[str]:
    """Return 'name==version' of every dependency's lower bound."""
    found = []
    for dependency in PROJECT["dependencies"]:
        match = re.match(r"([\w.\[\]-]+)>=([\w.]+)", dependency)
        if match is None:
            sys.exit(f"pyproject.toml: {dependency} has no lower bound")
        found.append(f"{match[1]}=={match[2]}")
    return found


def candidates(minor: int) -> list[str]:
    """Return the programs that may be Python 3.minor: those of pyenv, and on the PATH."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    ours = sorted(root.glob(f"versions/3.{minor}.*/bin/python3"), reverse=True)
    on_path = which(f"python3.{minor}")
    return [*map(str, ours), *([on_path] if on_path else [])]


def version_of(program: str) -> str | None:
    """Return the minor version of a Python, None where it does not start."""
    done = subprocess.run([program, "-c", PROBE], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def pythons() -> list[str]:
    """Return 'version program' of each Python that is admitted."""
    first = int(PROJECT["requires-python"].removeprefix(">=3."))
    found = []
    for minor in range(first, NEWEST_MINOR):
        works = (p for p in candidates(minor) if version_of(p) == f"3.{minor}")
        found.append(f"3.{minor} {next(works, '')}".strip())
    return found


if __name__ == "__main__":
    print("\n".join({"oldest": oldest, "pythons": pythons}[sys.argv[1]]()))
