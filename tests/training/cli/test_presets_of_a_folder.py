"""`--config-dir` adds presets from outside of the package, and hints name it."""

import sys
from types import SimpleNamespace

import pytest
import yaml

from steadyrl.core.errors import NonFiniteError
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


@pytest.mark.parametrize("way", ["seeds", "sweep"])
def test_the_command_that_continues_names_the_folder(tmp_path, monkeypatch, capsys, way):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine.yaml").write_text("id: Acrobot-v1\n")
    runs = tmp_path / "runs"
    many = {
        "seeds": ["seeds=[1,2]", f"run_dir={runs}"],
        "sweep": ["-m", "seed=1,2", f"hydra.sweep.dir={runs}", "hydra.job.name=mine"],
    }

    def failing(job):
        job.directory.mkdir(parents=True)
        (job.directory / "config.yaml").write_text(yaml.safe_dump(job.config))
        raise NonFiniteError("mine")

    arguments = ["train.py", "--config-dir", str(tmp_path), "env=mine", *many[way]]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        main(failing)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "resume: " in line]
    assert f" --config-dir={tmp_path} " in line and line.count("hydra.sweep.dir=") <= 1
    assert way == "seeds" or " hydra.job.name=mine " in line  # as hydra/launcher=…


@pytest.fixture
def folder(tmp_path):
    """Return a folder of presets: one for PPO, and one that lacks `override`."""
    (tmp_path / "experiment").mkdir()
    for name, line in (("mine", "override /agent: ppo"), ("bare", "/agent: ppo"),
                       ("relative", "agent: ppo")):  # fmt: skip
        text = f"# @package _global_\ndefaults:\n  - {line}\n"
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("agent.clp=3", "agent.clp=3: no such key; did you mean agent.clip?\n"),
        ("agent.double=true", "agent.double=true: is a key of dqn, and the agent is ppo\n"),
        ("+agent.clp=3", "+agent.clp=3: no such key; did you mean agent.clip?\n"),
        (
            "--rollout-steps=8",
            "--rollout-steps=8: no such option; keys are written without dashes: "
            "agent.rollout_steps=8\n",
        ),
    ],
)
def test_hints_know_the_agent_of_ones_own_preset(folder, monkeypatch, capsys, typed, hint):
    line = refused(monkeypatch, capsys, "--config-dir", str(folder), "experiment=mine", typed)
    assert line == f"error: {hint}"


@pytest.mark.parametrize("name", ["bare", "relative"])
def test_a_preset_without_override_is_told_what_to_write(folder, monkeypatch, capsys, name):
    line = refused(monkeypatch, capsys, "--config-dir", str(folder), f"experiment={name}")
    assert line == (
        f"error: experiment={name}: its defaults choose agent anew: "
        "write '- override /agent: ppo'\n"
    )
