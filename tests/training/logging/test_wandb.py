"""Weights & Biases gets the same metrics as TensorBoard; its failures do not end a run."""

import json
import logging
import os
import struct
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from opened import job

from steadyrl.core.errors import SettingError
from steadyrl.loop import train
from steadyrl.training.logging.logger import Logger
from steadyrl.training.logging.sinks import RunInfo
from steadyrl.training.logging.wandb import WandB
from steadyrl.training.run.hardware import validate_machine

CARD = RunInfo("s3", {"agent": {"name": "dqn"}, "seed": 3}, ["seed=3"])


class Fake:
    """Fake of the parts of wandb in use; methods named in `failing` raise."""

    def __init__(self, failing=()):
        self.failing, self.logged, self.inits = failing, [], []
        self.Histogram = lambda np_histogram: np_histogram[0].sum()
        self.Settings = SimpleNamespace

    def login(self, prompt):
        return False

    def init(self, **options):
        self.inits.append(options)
        self.weave_disabled = os.environ.get("WANDB_DISABLE_WEAVE")
        self._try("init")
        return self

    def log(self, values, step):
        self._try("log")
        self.logged.append((step, values))

    def finish(self):
        self._try("finish")

    def _try(self, what):
        if what in self.failing:
            raise RuntimeError(f"no {what} today")


def write_metrics(folder, monkeypatch, fake):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logger = Logger(folder, CARD, [WandB(folder, CARD)])
    for step in (10, 20):
        logger.write(step, {"eval/return_mean": step / 2}, 1.0, [(step - 1, 7.0)], [7.0] * 3)
    logger.close()
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


def test_wandb_gets_scalars_episode_returns_and_histograms(tmp_path, monkeypatch):
    fake = Fake()
    write_metrics(tmp_path, monkeypatch, fake)
    (inits,) = fake.inits
    assert inits["mode"] == "offline" and inits["config"] == CARD.config
    assert inits["dir"] == str(tmp_path)
    assert fake.logged == [
        (9, {"rollout/return": 7.0}),
        (10, {"eval/return_mean": 5.0, "rollout/returns": 3}),
        (19, {"rollout/return": 7.0}),
        (20, {"eval/return_mean": 10.0, "rollout/returns": 3}),
    ]


def test_a_configured_wandb_mode_is_respected(tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = Logger(tmp_path, CARD, [WandB(tmp_path, CARD)])
    logger.write(1, {}, 1.0)
    assert fake.inits[0]["mode"] == "disabled"


@pytest.mark.parametrize(("configured", "found"), [(None, "true"), ("false", "false")])
def test_wandbs_weave_integration_is_disabled_by_default(tmp_path, monkeypatch, configured, found):
    monkeypatch.setenv("WANDB_DISABLE_WEAVE", configured or "")
    if configured is None:
        monkeypatch.delenv("WANDB_DISABLE_WEAVE")
    fake = Fake()
    write_metrics(tmp_path, monkeypatch, fake)
    assert fake.weave_disabled == found


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_wandb_errors_cause_one_warning_and_complete_files(tmp_path, monkeypatch, caplog, failing):
    fake = Fake([failing])
    with caplog.at_level(logging.INFO, "steadyrl"):
        assert write_metrics(tmp_path, monkeypatch, fake) == [10, 20]
    assert len(fake.inits) == 1  # each retry could take minutes
    assert [m for m in caplog.messages if "today" in m] == [
        f"cannot write metrics (no {failing} today). Training continues; metrics are dropped until "
        "writing works again."
    ] * (failing != "finish")


def test_the_run_id_depends_on_the_directory(tmp_path, monkeypatch):
    inits = []
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        fake = Fake()
        write_metrics(tmp_path / name, monkeypatch, fake) if name == "b" or not inits else None
        monkeypatch.setitem(sys.modules, "wandb", fake)
        WandB(tmp_path / name, CARD)._get_run()
        inits.append(fake.inits[-1]["id"])
    assert inits[0] == inits[1] != inits[2]


def test_wandb_is_rejected_when_not_installed(tmp_path, monkeypatch):
    settings = SimpleNamespace(threads=1, device="cpu", log=SimpleNamespace(wandb=True))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"log\.wandb=true: needs wandb.*pip install"):
        validate_machine(settings)
    settings.log.wandb = False
    validate_machine(settings)


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_offline_wandb_files_hold_the_curves(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(job(tmp_path, "log.wandb=true", "total_steps=1000"))
    assert "wandb:" not in capfd.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    curve = {
        step: values["eval/return_mean"]
        for step, values in history(path)
        if "eval/return_mean" in values
    }
    assert curve == {
        line["step"]: line["eval/return_mean"] for line in lines if "eval/return_mean" in line
    }
    assert len(curve) == 1


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
