"""Weights & Biases gets the same metrics as TensorBoard; its failures do not end a run."""

import json
import logging
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
from opened import job
from unhurried import unhurried_saves

from steadyrl.core.errors import SettingError
from steadyrl.loop import train
from steadyrl.training.config.settings import WandbSettings
from steadyrl.training.logging.logger import Logger
from steadyrl.training.logging.sinks import RunInfo
from steadyrl.training.logging.wandb import WandB
from steadyrl.training.run.hardware import validate_machine

SETTINGS = WandbSettings(enabled=True, project="steadyrl", entity=None, group=None, tags=())
CARD = RunInfo("s3", {"agent": {"name": "dqn"}, "seed": 3}, ["seed=3"])

SHORT = ("total_steps=400", "eval.every=200", "log.every=100")


class Fake:
    """Fake of the parts of wandb in use; methods named in `failing` raise."""

    def __init__(self, failing=()):
        self.failing, self.logged, self.inits = failing, [], []
        self.resumed, self.step = False, 0
        self.Histogram = lambda np_histogram: np_histogram[0].sum()
        self.Settings = SimpleNamespace
        self.__spec__ = self  # it is installed

    def login(self, prompt):
        return False

    def init(self, **options):
        self.inits.append(options)
        self.weave_disabled = os.environ.get("WANDB_DISABLE_WEAVE")
        self._try("init")
        return self

    def log(self, values, step, commit):
        self._try("log")
        assert commit is (step % 10 == 0)
        self.logged.append((step, values))

    def finish(self):
        self._try("finish")

    def _try(self, what):
        if what in self.failing:
            raise RuntimeError(f"no {what} today")


class Server(Fake):
    """W&B online: keeps the runs by their ids and resumes them."""

    def __init__(self):
        super().__init__()
        self.runs = {}

    def init(self, **options):
        self.resumed = options["id"] in self.runs
        self.current = self.runs.setdefault(options["id"], {})
        self.step = max(self.current, default=-1) + 1
        return super().init(**options)

    def log(self, values, step, commit):
        self.current.setdefault(step, {}).update(values)


def write_metrics(folder, monkeypatch, fake):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logger = Logger(folder, CARD, [WandB(folder, CARD, SETTINGS)])
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


def test_an_episode_that_ends_at_a_record_is_part_of_it(tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = Logger(tmp_path, CARD, [WandB(tmp_path, CARD, SETTINGS)])
    logger.write(10, {"a": 1.0}, 1.0, [(7, 2.0), (10, 3.0)])
    logger.close()
    assert fake.logged == [(7, {"rollout/return": 2.0}), (10, {"a": 1.0, "rollout/return": 3.0})]


def test_a_configured_wandb_mode_is_respected(tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = Logger(tmp_path, CARD, [WandB(tmp_path, CARD, SETTINGS)])
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
        f"cannot write metrics to Weights & Biases (no {failing} today). Training continues; "
        "metrics are dropped until writing works again."
    ] * (failing != "finish")


def run_id(folder, fake, *, resumed):
    folder.mkdir(exist_ok=True)
    logger = Logger(folder, CARD, [WandB(folder, CARD, SETTINGS)], tensorboard=False)
    if resumed:
        logger.continue_after(10)
    logger.write(20, {}, 1.0)
    logger.close()
    return fake.inits[-1]["id"]


def test_a_resumed_run_keeps_its_id_and_a_new_one_in_its_place_has_another(tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    place = tmp_path / "a"
    first = run_id(place, fake, resumed=False)
    assert [run_id(place, fake, resumed=True) for _ in range(2)] == [first, first]
    assert run_id(tmp_path / "b", fake, resumed=False) != first
    again = run_id(place, fake, resumed=False)  # only some files of the first run were removed
    assert again != first and run_id(place, fake, resumed=True) == again
    shutil.rmtree(place)
    assert run_id(place, fake, resumed=True) not in (first, again)


def test_a_run_that_goes_on_from_its_mirror_keeps_its_id(tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    url = (tmp_path / "store").as_uri()
    chosen = ("log.wandb.enabled=true", f"checkpoint.mirror={url}", "checkpoint.every=200")
    train(job(tmp_path, *SHORT, *chosen))
    shutil.rmtree(tmp_path / "run")
    train(job(tmp_path, *SHORT, *chosen, "total_steps=600", f"resume={url}"))
    assert len(fake.inits) == 2 and len({each["id"] for each in fake.inits}) == 1


def test_an_earlier_checkpoint_is_continued_in_a_tracked_run_of_its_own(tmp_path, monkeypatch):
    """A tracker cannot drop the later steps: of the new ones it would take none up to the last."""
    fake = Server()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    saving = ("checkpoint.every=200", "checkpoint.keep=9")
    chosen = ("log.wandb.enabled=true", "log.every=100", "eval.every=0", *saving)
    with unhurried_saves():
        train(job(tmp_path, *chosen, "total_steps=400"))
    earlier = tmp_path / "run/checkpoints/step-000000000200"
    train(job(tmp_path, f"resume={earlier}", *chosen, "total_steps=800", quick=False))
    first, second = fake.runs.values()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    epsilon = {line["step"]: line["train/epsilon"] for line in lines}
    assert {step: second[step]["train/epsilon"] for step in epsilon} == epsilon
    assert max(first) == 400 and max(second) == 800


@pytest.mark.parametrize("total_steps", [400, 800])
def test_a_killed_run_of_another_length_is_a_tracked_run_of_its_own(
    tmp_path, monkeypatch, total_steps
):
    """What it logged after its last checkpoint is of other schedules."""
    fake = Server()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    saving = ("checkpoint.every=200", "checkpoint.keep=9")
    chosen = ("log.wandb.enabled=true", "log.every=100", "eval.every=0", *saving, "resume=auto")
    with unhurried_saves():
        train(job(tmp_path, *chosen, "total_steps=400"))
    run = tmp_path / "run"
    (run / "summary.json").unlink()  # killed after step 400 was logged, before it was saved
    for saved in (run / "checkpoints").glob("step-000000000400*"):
        shutil.rmtree(saved)
    train(job(tmp_path, *chosen, f"total_steps={total_steps}"))
    *before, last = fake.runs.values()
    assert len(before) == (total_steps != 400)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    epsilon = {line["step"]: line["train/epsilon"] for line in lines}
    assert {step: last[step]["train/epsilon"] for step in epsilon} == epsilon
    assert max(epsilon) == total_steps
    train(job(tmp_path, *chosen, "total_steps=1000"))  # it was saved at its end
    assert fake.runs.popitem()[1] is last and max(last) == 1000


def test_a_run_that_lost_its_checkpoints_is_a_tracked_run_of_its_own(tmp_path, monkeypatch):
    fake = Server()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    chosen = ("log.wandb.enabled=true", *SHORT, "resume=auto")
    train(job(tmp_path, *chosen))
    for name in ("checkpoints", "policy"):
        shutil.rmtree(tmp_path / "run" / name)
    train(job(tmp_path, *chosen, "seed=5"))
    first, second = fake.runs.values()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["eval/return_mean"] for line in lines if "eval/return_mean" in line] == [
        second[step]["eval/return_mean"] for step in (200, 400)
    ]
    assert first.keys() >= {200, 400}


def test_trackers_that_are_not_installed_are_refused(tmp_path, monkeypatch):
    enabled, not_ = SimpleNamespace(enabled=True), SimpleNamespace(enabled=False)
    settings = SimpleNamespace(threads=1, device="cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, other in (("wandb", "trackio"), ("trackio", "wandb")):
        settings.log = SimpleNamespace(**{name: enabled, other: not_})
        with pytest.raises(
            SettingError, match=rf"log\.{name}\.enabled=true: needs {name}.*pip inst"
        ):
            validate_machine(settings)
    settings.log = SimpleNamespace(wandb=not_, trackio=not_)
    validate_machine(settings)


@pytest.mark.parametrize(
    ("resumed", "step", "sent"),
    [
        (True, 16, [20, 30, 40]),  # a killed run's last record did not reach the server
        (True, 41, []),  # all of them did
        (False, 0, [10, 20, 30, 40]),  # offline: a new file with the whole history
    ],
)
def test_a_resumed_run_sends_what_is_missing_and_nothing_twice(
    tmp_path, monkeypatch, resumed, step, sent
):
    write_metrics(tmp_path, monkeypatch, Fake())
    fake = Fake()
    fake.resumed, fake.step = resumed, step
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = Logger(tmp_path, CARD, [WandB(tmp_path, CARD, SETTINGS)])
    logger.continue_after(20)
    for step in (30, 40):
        logger.write(step, {"eval/return_mean": step / 2}, 1.0)
    logger.close()
    assert fake.logged == [(step, {"eval/return_mean": step / 2}) for step in sent]


def test_a_copied_directory_is_a_new_run_with_the_whole_history(tmp_path, monkeypatch):
    (tmp_path / "first").mkdir()
    write_metrics(tmp_path / "first", monkeypatch, Fake())
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = Logger(tmp_path / "second", CARD, [WandB(tmp_path / "second", CARD, SETTINGS)])
    logger.continue_after(20)
    logger.write(30, {}, 1.0)
    logger.close()
    assert [step for step, _ in fake.logged] == [10, 20, 30]


def test_the_settings_reach_wandb(tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    overrides = ("enabled=true", "project=p", "entity=e", "group=g", "tags=[a,b]")
    chosen = [f"log.wandb.{each}" for each in overrides]
    train(job(tmp_path, *SHORT, "run_name=mine", *chosen))
    (found,) = fake.inits
    assert [found[key] for key in ("project", "entity", "group", "tags", "name")] == [
        *("p", "e", "g", ["a", "b"], "mine")
    ]


def test_a_failing_tracker_changes_nothing_of_training(tmp_path, monkeypatch):
    alone = train(job(tmp_path / "alone", *SHORT)).summary
    for failing in ("init", "log", "finish"):
        monkeypatch.setitem(sys.modules, "wandb", Fake([failing]))
        found = train(job(tmp_path / failing, *SHORT, "log.wandb.enabled=true")).summary
        assert (found.status, found.weights_sha256) == ("finished", alone.weights_sha256)
