"""An algorithm from another package trains like ours, from the command line."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from algorithms import NAMES, keys
from command import ROOT, environment
from hydra.core.config_store import ConfigStore
from opened import job
from outside_package import OUTSIDE

import steadyrl
from steadyrl.agents.registry import ALGORITHMS, algorithm, finished_policy
from steadyrl.agents.update_cost import update_cost
from steadyrl.core.errors import ExpectedError, SettingError
from steadyrl.training.cli.arguments import read
from steadyrl.training.cli.main import main
from steadyrl.training.run.hardware import WORTHWHILE_FLOP, is_worthwhile
from steadyrl.training.setup import build
from steadyrl.training.tuning.results import StudyPlan, use_of, write_preset
from steadyrl.training.tuning.search_space import Range, check_space

PAGE = ROOT / "docs" / "adding-an-algorithm.md"
AGENT = "agent.name=outside.a2c"
OURS = ", ".join(ALGORITHMS)


def install(folder, value):
    """Install a distribution whose entry point `broken.algo` has this value."""
    sys.modules.pop("broken", None)
    info = folder / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[steadyrl.agents]\nbroken.algo = {value}\n")


def train(folder, *overrides):
    """Train in a subprocess with the package installed; return the summary."""
    path = os.pathsep.join([str(OUTSIDE), environment()["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", AGENT, f"run_dir={folder / 'run'}", *overrides],
        env=environment() | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "run" / "summary.json").read_text())


def test_a2c_updates_are_too_small_for_a_gpu(installed, tmp_path):
    job_ = job(tmp_path, *read([AGENT]).overrides, quick=False)
    assert 0 < update_cost(job_.settings.agent, job_.spec).flop < WORTHWHILE_FLOP
    assert not is_worthwhile(job_.settings.run, job_.settings.agent, job_.spec)


def error_line(monkeypatch, capsys, *overrides, code=2):
    """Return the error line of a command that is rejected before training."""
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    with pytest.raises(SystemExit) as left:
        main(lambda accepted: pytest.fail("the command was accepted"))
    assert left.value.code == code
    line, *more = capsys.readouterr().err.splitlines()
    assert all(frame.startswith("  ") for frame in more)  # stack frames
    return line


def test_a2c_trains_and_is_evaluated_with_overrides(tmp_path):
    changes = ("total_steps=600", "eval.every=300", "eval.episodes=2", "env.num_envs=2")
    summary = train(tmp_path, "agent.learning_rate=1e-3", *changes)
    assert (summary["agent"], summary["status"]) == ("outside.a2c", "finished")
    assert summary["updates"] >= 600 // 2 // 16
    assert summary["eval_return_mean"] > 0
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "name: outside.a2c" in config
    assert "learning_rate: 0.001" in config
    assert "gae_lambda: 0.95" in config
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert {"train/policy_loss", "train/entropy", "train/grad_norm"} <= json.loads(last).keys()


def test_a_run_whose_package_is_not_installed_says_so(tmp_path, monkeypatch, capsys):
    train(tmp_path, "total_steps=64", "eval.every=0", "env.num_envs=2")
    run, named = tmp_path / "run", r"=outside\.a2c: no such agent; .* package needs it installed"
    with pytest.raises(ExpectedError, match=named):
        steadyrl.load(run)
    line = error_line(monkeypatch, capsys, f"resume={run}", "total_steps=128", code=3)
    assert re.search(named, line)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a2c_learns_cartpole(tmp_path, seed):
    summary = train(tmp_path, f"seed={seed}", "total_steps=200_000", "env.num_envs=8")
    # All of six seeds reached 500; two of them ended at 274 and 300, as A2C does.
    assert summary["best_eval_return_mean"] >= 475


def test_a2cs_state_and_policy_are_saved_and_loaded(installed, tmp_path):
    chosen = read([AGENT]).overrides
    run_job = job(tmp_path, *chosen, "env.num_envs=2", quick=False)
    with build(run_job) as (env, agent):
        actor = agent.actor(2, explore=True)
        env.reset()
        for _ in range(40):
            decision = actor.act(env.observation, env.episode_starts)
            agent.observe(decision, env.step(decision.env_action.numpy(force=True)))
            agent.update()
        assert agent.updates == 2
        state = agent.state_dict()
        settings = run_job.settings.agent
        greedy = agent.actor(2, explore=False).act(env.observation, env.episode_starts)
        loaded = finished_policy(settings, env.spec, agent.weights(), device=torch.device("cpu"))
        assert torch.equal(
            loaded.act(env.observation, env.episode_starts).env_action, greedy.env_action
        )
        weights = agent._learner.network.weights
        before = weights.clone()
        weights.zero_()
        agent.load_state_dict(state)
        assert torch.equal(weights, before)


def test_a2cs_last_update_still_learns(installed, tmp_path):
    """Its learning rate is that of the rollout's start: 1/K of the full one in the last of K."""
    chosen, rates = read([AGENT]).overrides, []
    run_job = job(tmp_path, *chosen, "env.num_envs=1", "total_steps=64", quick=False)
    with build(run_job) as (env, agent):
        step = agent._learner.step
        agent._learner.step = lambda batch, rate: (rates.append(rate), step(batch, rate))
        actor = agent.actor(1, explore=True)
        env.reset()
        steps = 0
        while steps < 64:
            decision = actor.act(env.observation, env.episode_starts)
            result = env.step(decision.env_action.numpy(force=True))
            agent.observe(decision, result)
            steps += result.valid.sum()
            agent.update()
    assert rates[0] == run_job.settings.agent.learning_rate
    assert len(rates) >= 4 and rates[-1] >= rates[0] / 5


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("agent.learning_rat=1", "agent.learning_rat=1: no such key; did you mean agent.learning_"),
        ("agent.epochs=3", "is a key of {owners}, and the agent is outside.a2c"),
        ("agent.gamma=2", "agent.gamma=2: must be between 0 and 1"),
        ("agent.hidden=[]", "agent.hidden=[]: needs at least one layer"),
    ],
)
def test_a2cs_keys_are_validated_like_ours(installed, monkeypatch, capsys, override, reason):
    key = override.partition("=")[0]
    owners = " and ".join(name for name in NAMES if key in keys(name))
    assert reason.format(owners=owners) in error_line(monkeypatch, capsys, AGENT, override)


@pytest.mark.parametrize("name", ["outside.a2d", "outside.a2c_settings", "os.path", "a2c"])
def test_only_registered_names_are_found(installed, monkeypatch, capsys, name):
    """Module paths are not names: a configuration cannot import modules."""
    line = error_line(monkeypatch, capsys, f"agent.name={name}")
    names = f"{OURS}, outside.a2c, outside.fourier"
    reason = f"no such agent; there are: {names}. One of another package needs it installed"
    assert line == f"error: agent.name={name}: {reason}"
    assert "outside.a2c_settings" not in sys.modules


@pytest.mark.parametrize(
    ("value", "code", "reason"),
    [
        ("broken:ALGO", "1 / 0", "broken:ALGO cannot be imported: ZeroDivisionError: division"),
        ("broken:ALGO", "raise SystemExit(0)", "broken:ALGO cannot be imported: SystemExit: 0"),
        ("broken:ALGO", "pass", "broken:ALGO cannot be imported: AttributeError"),
        ("absent:ALGO", "", "absent:ALGO cannot be imported: ModuleNotFoundError"),
        ("broken:ALGO", "ALGO = 3", "broken:ALGO is no steadyrl.agents.registry.Algorithm"),
    ],
)
def test_a_broken_entry_point_is_named(tmp_path, monkeypatch, capsys, value, code, reason):
    install(tmp_path, value)
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    line = error_line(monkeypatch, capsys, "agent.name=broken.algo")
    assert f"its entry point {reason}" in line


@pytest.mark.parametrize(
    ("defaults", "reason"),
    [("None", "has no defaults file"), ("Path('/absent.yaml')", "cannot be read: FileNotF")],
)
def test_missing_defaults_are_named(installed, tmp_path, monkeypatch, capsys, defaults, reason):
    install(tmp_path, "broken:ALGO")
    (tmp_path / "broken.py").write_text(
        "from pathlib import Path\nfrom outside.a2c_settings import A2C\n"
        f"ALGO = A2C._replace(defaults={defaults})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    line = error_line(monkeypatch, capsys, "agent.name=broken.algo")
    assert reason in line


def test_a_sweep_may_mix_registered_and_outside_agents(installed):
    assert read(["-m", "agent=dqn,outside.a2c"]).overrides == ["agent=dqn,outside.a2c"]
    assert "outside.a2c.yaml" in ConfigStore.instance().repo["agent"]
    assert read(["agent=ppo", "seed=1"]).overrides == ["agent=ppo", "seed=1"]


@pytest.mark.parametrize("agent", ["agent=outside.a2c", "agent.name=outside.a2c"])
def test_a_study_tunes_it_and_its_preset_trains(installed, tmp_path, monkeypatch, capsys, agent):
    plan = StudyPlan(
        name="tuned", overrides=[agent, "env=acrobot"], space={}, trials=1, seeds=[0],
        folder=tmp_path, check_seeds=[], storage="", sampler="tpe", pruner="none", evaluations=1,
    )  # fmt: skip
    check_space(plan.overrides, {"agent.gamma": Range(low=0.9, high=0.99)}, tmp_path)
    plan.preset.parent.mkdir()
    write_preset(plan, ["agent.gamma=0.875"], -90.0)
    command = shlex.split(use_of(plan))
    arguments = command[command.index("--config-dir") :]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, "--cfg", "job"])
    main(lambda job: None)
    printed = capsys.readouterr().out
    assert all(line in printed for line in ("name: outside.a2c", "gamma: 0.875", "Acrobot-v1"))


def test_the_registry_rejects_unknown_names():
    with pytest.raises(SettingError, match=f"no such agent; there are: {OURS}"):
        algorithm("absent")


@pytest.mark.parametrize("path", sorted(OUTSIDE.glob("outside/[af]*")), ids=lambda path: path.name)
def test_the_page_shows_the_files_verbatim(path: Path):
    assert path.read_text() in PAGE.read_text()
