"""Weights & Biases and Trackio themselves, offline: one history of a killed and resumed run."""

import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
from importlib.util import find_spec

import pytest
from command import environment
from opened import job

from steadyrl.loop import train

# Steps 10 to 50, then killed; resumed after 30 and trained to 70.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from steadyrl.training.config.settings import TrackioSettings, WandbSettings
from steadyrl.training.logging.logger import Logger
from steadyrl.training.logging.sinks import RunInfo
from steadyrl.training.logging.trackio import Trackio
from steadyrl.training.logging.wandb import WandB

kind, folder, resumed = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "resumed"
info = RunInfo("mine", {"seed": 3}, ["seed=3"])
both = {"enabled": True, "project": "steadyrl-test", "group": None}
if kind == "trackio":
    sink = Trackio(folder, info, TrackioSettings(**both))
else:
    sink = WandB(folder, info, WandbSettings(**both, entity=None, tags=()))
logger = Logger(folder, info, [sink], tensorboard=False)
if resumed:
    logger.continue_after(30)
for step in range(40 if resumed else 10, 80 if resumed else 60, 10):
    logger.write(step, {"eval/return_mean": step / 4}, 1.0, [(step - 5, 1.0)], [1.0, 2.0])
if not resumed:
    os.kill(os.getpid(), signal.SIGKILL)
logger.close()
"""
TRACKERS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}"))
    for name in ("wandb", "trackio")
]


def variables(folder):
    """Return environment variables that keep the trackers offline and in `folder`."""
    own = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([environment()["PYTHONPATH"], inherited])
    return environment() | own | {"PYTHONPATH": path}


def found(kind, folder):
    """Return (step, values) of everything that the tracker holds of the one run."""
    if kind == "trackio":
        with sqlite3.connect(folder / "trackio" / "steadyrl-test.db") as database:
            records = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        assert len({name for name, *_ in records}) == 1
        return [(step, json.loads(values)) for _, step, values in records]
    paths = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.name for path in paths}) == 1  # named after the run's id
    return list(history(paths[-1]))


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_killed_and_resumed_run_has_every_step_once(kind, tmp_path):
    for how, code in (("killed", -signal.SIGKILL), ("resumed", 0)):
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, kind, str(tmp_path), how],
            env=variables(tmp_path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == code, ended.stderr
        assert ended.stdout == "" and "Traceback" not in ended.stderr
    curve = [
        (step, values["eval/return_mean"])
        for step, values in found(kind, tmp_path)
        if "eval/return_mean" in values
    ]
    assert sorted(curve) == [(step, step / 4) for step in range(10, 80, 10)]


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_run_with_a_tracker_has_the_same_weights_and_curves(kind, tmp_path, monkeypatch, capfd):
    for name, value in variables(tmp_path).items():
        if name.startswith(("WANDB", "TRACKIO")):
            monkeypatch.setenv(name, value)
    if kind == "trackio":
        pytest.importorskip("trackio.sqlite_storage")
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    short = ("total_steps=1000", "eval.every=500")
    alone = train(job(tmp_path / "alone", *short)).summary
    capfd.readouterr()
    chosen = (f"log.{kind}.enabled=true", f"log.{kind}.project=steadyrl-test")
    with_it = train(job(tmp_path, *short, *chosen)).summary
    printed = capfd.readouterr()
    assert kind not in printed.out + printed.err
    assert with_it.weights_sha256 == alone.weights_sha256
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    where = tmp_path / "run" if kind == "wandb" else tmp_path
    for tag in ("eval/return_mean", "train/loss"):
        curve = {step: values[tag] for step, values in found(kind, where) if tag in values}
        assert curve and curve == {line["step"]: line[tag] for line in lines if tag in line}


def history(path):
    """Yield the history of wandb's offline file, read with its own record format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record_bytes = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # padding at the end of a block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record_bytes += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            record, record_bytes = Record.FromString(record_bytes), b""
            if record.HasField("history"):
                items = record.history.item
                yield (
                    record.history.step.num,
                    {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items},
                )
