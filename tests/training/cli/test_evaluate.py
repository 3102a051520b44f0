"""What `scripts/evaluate.py` says of a policy is what its run said, and every refusal is a line."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import warm

from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.ppo.agent import PPO
from steadyrl.envs.arithmetic import flushes_subnormals
from steadyrl.envs.rendering import video
from steadyrl.training.checkpoints.manifest import CheckpointError, self_hash
from steadyrl.training.cli.evaluate import command
from steadyrl.training.evaluation import evaluator
from steadyrl.training.policies.find import find_policy, settings_of

PPO_QUICK = (
    "agent=ppo",
    "env=pendulum",
    "env.num_envs=2",
    "device=cpu",
    "total_steps=512",
    "agent.rollout_steps=128",
    "agent.normalize_obs=true",
    "agent.compile=false",
    "eval.every=256",
    "eval.episodes=3",
    "seed=0",
)


@pytest.fixture(scope="module")
def dqn(tmp_path_factory):
    run, summary, _ = warm.run(tmp_path_factory.mktemp("dqn"), "total_steps=600", "eval.every=300")
    return run, summary


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    run, summary, _ = warm.run(tmp_path_factory.mktemp("ppo"), *PPO_QUICK, quick=False)
    return run, summary


@pytest.fixture
def evaluate(capsys):
    """Return a function that evaluates and returns the JSON it prints."""

    def run(*arguments):
        command([*map(str, arguments), "--json"])
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refused(capsys):
    """Return a function that is refused and returns its line."""

    def run(*arguments, code=2):
        with pytest.raises(SystemExit) as end:
            command(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert (end.value.code, out, err.count("\n")) == (code, "", 1), err
        assert err.startswith("error: ")
        return err

    return run


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_what_environments_print_is_no_part_of_the_report(tmp_path, capfd, backend):
    told = ["env.id=hostile_envs:Hostile-v0", "env.kwargs.where=step", "env.kwargs.harm=print"]
    run, _, _ = warm.run(tmp_path, *told, f"env.backend={backend}", "total_steps=100")
    capfd.readouterr()
    command([str(run), "--env", "id=hostile_envs:Hostile-v0", "--episodes=2", "--json"])
    out, err = capfd.readouterr()
    assert json.loads(out)["lengths"] == [20, 20]
    assert err.count("hello") == 40


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_what_environments_fail_by_is_a_line_without_escape_sequences(dqn, capfd, backend):
    told = ["id=hostile_envs:Hostile-v0", "kwargs.where=step", "kwargs.harm=escape"]
    told += ["kwargs.numbers=4", f"backend={backend}", "max_restarts=1000"]
    command([str(dqn[0]), *(f"--env={each}" for each in told), "--episodes=8", "--json"])
    out, err = capfd.readouterr()
    assert json.loads(out)["episodes"] == 8
    assert "rebuilding it" in err and "owned" in err
    assert "Traceback" not in err and not set("\x1b\x07") & set(out + err)


@pytest.mark.parametrize(
    "metadata", [{"spec": None}, {"spec": {}}, {"weights": None}, {"step": "x"}]
)
def test_a_manifest_that_lacks_what_it_should_say_is_refused(dqn, tmp_path, metadata, capsys):
    shutil.copytree(dqn[0] / "policy", tmp_path / "policy")
    manifest = json.loads((tmp_path / "policy" / "manifest.json").read_text())
    manifest["metadata"] |= metadata
    manifest["sha256"] = self_hash(manifest)
    (tmp_path / "policy" / "manifest.json").write_text(json.dumps(manifest))
    try:
        command([str(tmp_path / "policy")])
    except SystemExit as end:
        assert end.code == 3
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    assert ("error: " in told.err) == ("step" not in metadata)


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_its_score_is_the_runs_final_score_to_the_digit(algorithm, request, evaluate):
    run, summary = request.getfixturevalue(algorithm)
    found = evaluate(run)
    for key in ("mean", "std"):
        assert found[f"return_{key}"] == summary[f"eval_return_{key}"]
    assert found["episodes"] == len(found["returns"]) == summary["eval_episodes"]
    assert found["step"] == summary["steps"]
    assert evaluate(run, "--best")["return_mean"] == summary["best_eval_return_mean"]
    assert evaluate(run / "policy")["return_mean"] == summary["eval_return_mean"]


def test_it_builds_nothing_that_learns(dqn, evaluate, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a trainer was built")

    for agent in (DQN, PPO):
        monkeypatch.setattr(agent, "__init__", refuse)
    assert evaluate(dqn[0])["episodes"] == 3


@pytest.mark.parametrize("options", [(), ("--sample",)])
def test_a_seed_decides_everything(dqn, evaluate, options):
    run, _ = dqn
    first = evaluate(run, "--episodes", 12, "--seed", 5, *options)
    assert len(first["lengths"]) == 12
    assert evaluate(run, "--episodes", 12, "--seed", 5, *options) == first
    assert evaluate(run, "--episodes", 12, "--seed", 6, *options)["returns"] != first["returns"]


def test_environments_compute_as_in_training(dqn, evaluate, monkeypatch):
    found, build_env = [], evaluator.build_env

    def build(*args, **kwargs):
        found.append(flushes_subnormals())
        return build_env(*args, **kwargs)

    monkeypatch.setattr(evaluator, "build_env", build)
    torch.set_flush_denormal(False)
    evaluate(dqn[0], "--episodes", 1)
    assert found == [True]


def test_sampling_is_not_greedy(ppo, evaluate):
    run, _ = ppo
    greedy, sampled = evaluate(run), evaluate(run, "--sample")
    assert sampled["sample"] and sampled["returns"] != greedy["returns"]


def test_it_tells_people_the_same(dqn, evaluate, capsys):
    run, summary = dqn
    low, high = evaluate(run)["return_ci95"]
    command([str(run)])
    told = capsys.readouterr().out
    assert f"return:   {summary['eval_return_mean']}, std {summary['eval_return_std']}" in told
    assert f"{low} to {high}" in told and "seed 0, greedy" in told


def test_the_environment_may_be_another_of_the_same_shape(dqn, evaluate, refused):
    run, _ = dqn
    assert max(evaluate(run, "--env", "kwargs.max_episode_steps=4")["lengths"]) == 4
    line = refused(run, "--env", "id=Acrobot-v1")
    assert "trained on CartPole-v1" in line
    assert "[4] float32 in training and [6] float32 now" in line
    assert "Discrete(n=2) in training and Discrete(n=3) now" in line
    assert "stack" not in line
    assert "4 of [4] float32 now" in refused(run, "--env", "frame_stack=4")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("gravity=3", "env.gravity=3: no such key"),
        ("kwargs.g=3", "env.kwargs.g=3: CartPole-v1 has no such keyword argument"),
        ("kwargs", "write KEY=VALUE"),
        ("kwargs={a", "--env kwargs={a: ParserError"),
        ("id=CartPole-v9", "env.id=CartPole-v9"),
        ("id=no_module:X-v0", "cannot import no_module"),
        ("frame_stack=two", "env.frame_stack=two: must be an integer"),
    ],
)
def test_bad_environments_are_refused(dqn, refused, override, reason):
    assert reason in refused(dqn[0], "--env", override)


def test_what_holds_no_policy_is_refused(dqn, tmp_path, refused):
    run, _ = dqn
    assert "no such run" in refused(tmp_path / "nowhere")
    assert "no such run" in refused(tmp_path / ("x" * 300))
    assert "neither a run nor a policy" in refused(tmp_path)
    assert "is a file" in refused(run / "summary.json")
    assert "/: neither a run nor a policy" in refused("/")
    assert "is a checkpoint" in refused(next((run / "checkpoints").iterdir()))
    assert f"did you mean {run}?" in refused(run.parent)
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.yaml").touch()
    assert "did not finish" in refused(begun)
    assert "was never evaluated" in refused(begun, "--best")


def test_what_a_policy_of_today_lacks_or_says_wrongly_is_refused_by_its_key(dqn):
    """Those of other formats are refused as a whole (test_formats.py)."""
    config = find_policy(dqn[0]).metadata["config"]
    for group, key, match in (("env", "wrappers", "lacks env.wrappers"), ("log", "wandb", "wandb")):
        policy = find_policy(dqn[0])
        del policy.metadata["config"][group][key]
        with pytest.raises(CheckpointError, match=match):
            settings_of(policy, [])
    policy = find_policy(dqn[0])
    assert policy.metadata["config"] == config
    policy.metadata["config"]["env"]["num_envs"] = "many"
    with pytest.raises(CheckpointError, match=r"env.num_envs=many"):
        settings_of(policy, [])


def test_a_damaged_policy_ends_with_3(dqn, tmp_path, refused):
    run, _ = dqn
    broken = tmp_path / "policy"
    broken.mkdir()
    for file in (run / "policy").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "policy.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "is damaged" in refused(broken, code=3)
    (broken / "manifest.json").write_text("{}")
    assert "is damaged" in refused(broken, code=3)
    (broken / "manifest.json").unlink()
    assert "has no manifest.json" in refused(broken, code=3)


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_that_is_going_on_is_evaluated_and_said_to_be(dqn, tmp_path, refused, capsys):
    active = tmp_path / "going"
    (active / "policy-best").mkdir(parents=True)
    (active / "config.yaml").touch()
    command_line = [sys.executable, "-c", HOLD, str(active / ".lock")]
    holder = subprocess.Popen(command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        (active / "policy-best").rmdir()
        assert "no policy yet" in refused(active)
        (dqn[0] / "policy-best").rename(active / "policy-best")
        try:
            command([str(active)])
        finally:
            (active / "policy-best").rename(dqn[0] / "policy-best")
    finally:
        holder.communicate()
    out, err = capsys.readouterr()
    assert "return: " in out
    assert "is still running" in err and "using policy-best/" in err


@pytest.mark.parametrize("name", ["film.avi", "nowhere/film.mp4", "."])
def test_files_that_can_be_no_film_are_refused(dqn, tmp_path, refused, name):
    assert "--video" in refused(dqn[0], "--video", tmp_path / name)


def test_the_extra_that_is_missing_is_named(dqn, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(video, "video_encoder_missing", lambda: True)
    line = refused(dqn[0], "--video", tmp_path / "film.mp4")
    assert 'needs av to write videos, install it with: pip install -e ".[video]"' in line


def test_watching_needs_a_display(dqn, refused, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    assert "no display" in refused(dqn[0], "--watch")
    monkeypatch.setenv("DISPLAY", ":77")  # nobody is there
    assert "opens no window" in refused(dqn[0], "--watch")


def test_what_is_watched_is_scored(dqn, evaluate, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # a display that nobody sees
    found = evaluate(dqn[0], "--watch")
    assert found["episodes"] == 1 and found["lengths"] == [int(found["return_mean"])]


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_the_film_decodes_and_shows_every_observation(dqn, tmp_path, evaluate, suffix):
    av = pytest.importorskip("av")
    film = tmp_path / f"film.{suffix}"
    found = evaluate(dqn[0], "--video", film, "--episodes", 2)
    with av.open(str(film)) as container:
        frames = [(frame.width, frame.height) for frame in container.decode(video=0)]
    # Of each episode the first observation, and one for every step.
    assert frames == [(600, 400)] * (sum(found["lengths"]) + 2)
    assert len(found["lengths"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [film.name]


@pytest.mark.parametrize(
    "arguments",
    [(), ("--episodes", "0"), ("--seed", "-1"), ("--watch", "--video", "a.gif"), ("-x",)],
)
def test_commands_that_cannot_be_meant_are_refused(dqn, refused, arguments):
    given = arguments if not arguments else (dqn[0], *arguments)
    refused(*given)
