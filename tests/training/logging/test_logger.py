import json
import math
import os
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from steadyrl.training.logging.logger import Logger


def read_events(directory):
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return {
        tag: [(e.step, e.value) for e in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def read_lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_written_to_both_files(tmp_path):
    logger = Logger(tmp_path)
    logger.write(10, {"train/loss": 0.5, "rollout/return_mean": 20.0}, 1.0)
    logger.write(20, {"train/loss": 0.25}, 2.0)
    logger.close()
    assert read_events(tmp_path) == {
        "train/loss": [(10, 0.5), (20, 0.25)],
        "rollout/return_mean": [(10, 20.0)],
        "episode/return": [(10, 20.0)],
    }
    assert read_lines(tmp_path) == [
        {"step": 10, "wall_seconds": 1.0, "train/loss": 0.5, "rollout/return_mean": 20.0},
        {"step": 20, "wall_seconds": 2.0, "train/loss": 0.25},
    ]


def test_steps_must_increase_strictly(tmp_path):
    logger = Logger(tmp_path)
    logger.write(10, {"a": 1.0}, 0)
    with pytest.raises(ValueError, match="step 10"):
        logger.write(10, {"a": 1.0}, 0)
    logger.close()


def test_resuming_drops_later_lines_only(tmp_path):
    logger = Logger(tmp_path)
    for step in (10, 20, 30, 40, 50):
        logger.write(step, {"a": 1.0}, 0)
    logger.close()
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    damaged = lines[1].replace(b"step", b"\xff\0ep")  # a disk error
    file.write_bytes(b"".join([lines[0], damaged, *lines[2:], b'{"step": 6']))
    logger = Logger(tmp_path)
    logger.continue_after(40)
    logger.write(45, {"a": 1.0}, 0)
    logger.close()
    written = file.read_bytes().splitlines(keepends=True)
    assert written[:4] == [lines[0], damaged, *lines[2:4]]
    assert [json.loads(line)["step"] for line in written[4:]] == [45]


def test_a_file_that_was_deleted_begins_anew_and_says_so(tmp_path, caplog):
    logger = Logger(tmp_path)
    logger.write(10, {"a": 1.0}, 0)
    (tmp_path / "metrics.jsonl").unlink()
    for step in (20, 30):
        logger.write(step, {"a": 1.0}, 0)
    logger.close()
    assert [line["step"] for line in read_lines(tmp_path)] == [20, 30]
    assert [message.partition(" was deleted")[0] for message in caplog.messages] == [
        str(tmp_path / "metrics.jsonl")
    ]


def test_non_finite_values_are_left_out(tmp_path):
    logger = Logger(tmp_path)
    logger.write(1, {"a": math.nan, "b": 2.0}, 0)
    logger.close()
    assert read_lines(tmp_path) == [{"step": 1, "wall_seconds": 0, "b": 2.0}]


def test_written_metrics_survive_a_kill(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from steadyrl.training.logging.logger import Logger\n"
        "logger = Logger(Path(sys.argv[1]))\n"
        "[logger.write(i, {'a': float(i)}, 0) for i in range(1, 6)]\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(read_lines(tmp_path)) == 5
    assert len(read_events(tmp_path)["a"]) == 5


FULL_DISK = """
import logging, sys
from pathlib import Path
from steadyrl.training.logging.logger import Logger
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s", level="INFO")
target = Path(sys.argv[1])
logger = Logger(target)
# Records so wide that a few fill the already allocated pages.
padding = {f"padding/{i}": 1.0 for i in range(100)}
filler = target / "filler"
for step in range(1, 31):
    if step == 11:
        with open(filler, "wb", buffering=0) as file:
            size = 1 << 16
            while size:
                try:
                    file.write(b"x" * size)
                except OSError:
                    size //= 2
    if step == 21:
        filler.unlink()
    logger.write(step, {"a": float(step), **padding}, 0)
logger.close()
"""


def test_a_full_disk_causes_one_warning_and_readable_files(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        done = subprocess.run(
            [sys.executable, "-c", FULL_DISK, str(disk)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("WARNING") == 1
        assert "written again" in done.stdout
        steps = [record["step"] for record in read_lines(disk)]
        assert steps[:10] == list(range(1, 11))
        assert steps[-10:] == list(range(21, 31))
        written = [step for step, _ in read_events(disk)["a"]]
        assert written[:10] == list(range(1, 11))
        assert written[-10:] == list(range(21, 31))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_size_limit_causes_one_warning(tmp_path):
    """As above where no file system can be mounted: writes fail at a file size limit."""
    code = (
        "import logging, resource, signal, sys; from pathlib import Path\n"
        "from steadyrl.training.logging.logger import Logger\n"
        "logging.basicConfig(stream=sys.stdout, format='%(levelname)s %(message)s')\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))\n"
        "logger = Logger(Path(sys.argv[1]))\n"
        "[logger.write(i, {'a': float(i)}, 0) for i in range(1, 40)]\n"
        "logger.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING") == 1
    assert [record["step"] for record in read_lines(tmp_path)][:5] == [1, 2, 3, 4, 5]
