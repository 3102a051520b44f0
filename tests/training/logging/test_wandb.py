"""Weights & Biases gets what TensorBoard gets, and whatever it does the run goes on."""

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
    """The part of wandb that is used; it fails where it is told to."""

    def __init__(self, failing=()):
        self.failing, self.logged, self.begun = failing, [], []
        self.Histogram = lambda np_histogram: np_histogram[0].sum()
        self.Settings = SimpleNamespace

    def login(self, prompt):
        return False

    def init(self, **options):
        self.begun.append(options)
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


def written(folder, monkeypatch, fake):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logger = Logger(folder, CARD, [WandB(folder, CARD)])
    for step in (10, 20):
        logger.write(step, {"eval/return_mean": step / 2}, 1.0, [(step - 1, 7.0)], [7.0] * 3)
    logger.close()
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


def test_it_gets_scalars_single_episodes_and_the_histogram(tmp_path, monkeypatch):
    fake = Fake()
    written(tmp_path, monkeypatch, fake)
    (begun,) = fake.begun
    assert begun["mode"] == "offline" and begun["config"] == CARD.config
    assert begun["dir"] == str(tmp_path)
    assert fake.logged == [
        (9, {"rollout/return": 7.0}),
        (10, {"eval/return_mean": 5.0, "rollout/returns": 3}),
        (19, {"rollout/return": 7.0}),
        (20, {"eval/return_mean": 10.0, "rollout/returns": 3}),
    ]


def test_what_was_asked_for_goes_before_what_is_known(tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = Logger(tmp_path, CARD, [WandB(tmp_path, CARD)])
    logger.write(1, {}, 1.0)
    assert fake.begun[0]["mode"] == "disabled"


@pytest.mark.parametrize(("asked", "found"), [(None, "true"), ("false", "false")])
def test_agents_of_ours_are_not_taken_for_those_of_language_models(
    tmp_path, monkeypatch, asked, found
):
    monkeypatch.setenv("WANDB_DISABLE_WEAVE", asked or "")
    if asked is None:
        monkeypatch.delenv("WANDB_DISABLE_WEAVE")
    fake = Fake()
    written(tmp_path, monkeypatch, fake)
    assert fake.weave_disabled == found


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_when_it_fails_there_is_one_warning_and_the_other_files_are_whole(
    tmp_path, monkeypatch, caplog, failing
):
    fake = Fake([failing])
    with caplog.at_level(logging.INFO, "steadyrl"):
        assert written(tmp_path, monkeypatch, fake) == [10, 20]
    assert len(fake.begun) == 1  # each try could take minutes
    assert [m for m in caplog.messages if "today" in m] == [
        f"cannot write metrics (no {failing} today). Training continues; metrics are dropped until "
        "writing works again."
    ] * (failing != "finish")


def test_the_same_directory_is_the_same_run_and_another_is_another(tmp_path, monkeypatch):
    begun = []
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        fake = Fake()
        written(tmp_path / name, monkeypatch, fake) if name == "b" or not begun else None
        monkeypatch.setitem(sys.modules, "wandb", fake)
        WandB(tmp_path / name, CARD)._get_run()
        begun.append(fake.begun[-1]["id"])
    assert begun[0] == begun[1] != begun[2]


def test_it_is_refused_where_it_is_not_installed(tmp_path, monkeypatch):
    settings = SimpleNamespace(threads=1, device="cpu", log=SimpleNamespace(wandb=True))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"log\.wandb=true: needs wandb.*pip install"):
        validate_machine(settings)
    settings.log.wandb = False
    validate_machine(settings)


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_offline_the_run_directory_holds_the_curves(tmp_path, monkeypatch, capfd):
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
    """Read a run's history with wandb's own records, out of the file that it would upload."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block is no header
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, whole = Record.FromString(whole), b""
            if record.HasField("history"):
                items = record.history.item
                yield (
                    record.history.step.num,
                    {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items},
                )
