"""`--config-dir` adds presets from outside of the package, and hints name it."""

import sys
from types import SimpleNamespace

import pytest

from steadyrl.loop import train
from steadyrl.training.cli.main import main


def refused(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as left:
        main(train)
    assert left.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1
    return shown.err


@pytest.mark.parametrize("group", ["env", "experiment"])
def test_an_unlike_preset_names_the_option(monkeypatch, capsys, group):
    line = refused(monkeypatch, capsys, f"{group}=qqqq")
    assert f"no such {group}; --config-dir DIR adds DIR/{group}/qqqq.yaml; there are: " in line


def test_a_misspelt_preset_names_the_nearest_only(monkeypatch, capsys):
    line = refused(monkeypatch, capsys, "env=cartpol")
    assert line == "error: env=cartpol: no such env; did you mean cartpole?\n"


def test_a_missing_folder_is_one_line(monkeypatch, capsys):
    line = refused(monkeypatch, capsys, "--config-dir", "/no/such/folder", "env=mine")
    assert line == "error: --config-dir /no/such/folder: no such directory\n"


def test_presets_of_a_folder_are_taken(tmp_path, monkeypatch):
    for name, text in {
        "env/mine.yaml": "id: Acrobot-v1\nnum_envs: 3\n",
        "experiment/ours.yaml": "# @package _global_\ndefaults:\n  - override /env: mine\n"
        "total_steps: 777\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    jobs = []
    for chosen in ("env=mine", "experiment=ours"):
        monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir", str(tmp_path), chosen])
        main(lambda job: jobs.append(job) or SimpleNamespace(exit_code=0, score=0.0))
    one, other = (job.settings.run for job in jobs)
    assert (one.env.id, one.env.num_envs) == (other.env.id, other.env.num_envs) == ("Acrobot-v1", 3)
    assert other.total_steps == 777
