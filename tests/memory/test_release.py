import json
import os
import subprocess
import sys

import pytest
from algorithms import NAMES


@pytest.mark.long
@pytest.mark.parametrize("agent", NAMES)
def test_a_finished_run_releases_its_memory(request, tmp_path, agent):
    root = request.config.rootpath
    path = f"{root}{os.pathsep}{root / 'tests' / 'helpers'}"
    out = subprocess.run(
        [sys.executable, str(root / "tests/helpers/releasing.py"), agent, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    rss = json.loads(out.stdout.splitlines()[-1])
    assert rss["meanwhile"] - rss["before"] > 150e6
    assert abs(rss["after"] - rss["before"]) < 0.02 * rss["before"], rss
