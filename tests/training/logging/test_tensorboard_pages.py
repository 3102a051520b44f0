"""TensorBoard in a real browser on a finished sweep: its pages have content.

With `STEADYRL_PICTURES=DIR` screenshots are stored there.
"""

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from browser import BROWSER, Browser
from warm import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium"),
]
PAGES = {
    "timeseries": ("rollout", "eval /return_mean", "Smoothed"),
    "hparams": ("agent.name", "dqn", "ppo", "seed", "eval/return_mean"),
    "text": ("train.py", "agent=ppo", "configuration"),
    "custom_scalars": ("score", "return of single episodes", "learning", "memory"),
    "histograms": ("rollout/returns",),
}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    run(folder, "-m", "seed=0,1", "agent=dqn,ppo", "total_steps=4000", "agent.hidden=[16]",
        "agent.compile=false", "eval.every=1000", "eval.episodes=2", "log.every=200",
        quick=False)  # fmt: skip
    program = "from tensorboard.main import run_main; run_main()"
    server = subprocess.Popen(
        [sys.executable, "-c", program, "--logdir", ".", "--host", "127.0.0.1", "--port", "0"],
        stderr=subprocess.PIPE,
        cwd=folder,
        text=True,
    )
    try:
        found = (re.search(r"http://127\.0\.0\.1:\d+/", line) for line in server.stderr)
        yield next(match for match in found if match)[0]
    finally:
        server.terminate()
        server.communicate()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with closing(Browser(tmp_path_factory.mktemp("profile"))) as opened:
        yield opened


@pytest.mark.parametrize("page", PAGES)
def test_tensorboard_pages_show_the_runs(address, browser, page):
    text = browser.shown(f"{address}#{page}", *PAGES[page])
    if "STEADYRL_PICTURES" in os.environ:
        (Path(os.environ["STEADYRL_PICTURES"]) / f"{page}.png").write_bytes(browser.picture())
    missing = [word for word in PAGES[page] if word not in text]
    assert not missing, f"{missing} not in {text[:2000]}"
