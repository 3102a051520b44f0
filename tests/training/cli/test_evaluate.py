"""`scripts/evaluate.py`: scores equal the run's, videos, and one-line errors."""

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
from steadyrl.training.cli.evaluate import main
from steadyrl.training.evaluation import evaluator
from steadyrl.training.policies.find import find_policy, settings_of
from steadyrl.training.policies.policy import read_policy
from steadyrl.training.run import hardware

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
        main([*map(str, arguments), "--json"])
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def error_of(capsys):
    """Return a function that runs a rejected command and returns its error line."""

    def run(*arguments, code=2, lines=1):
        with pytest.raises(SystemExit) as end:
            main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert (end.value.code, out, err.count("\n")) == (code, "", lines), err
        assert err.startswith("error: ")
        return err

    return run


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_output_of_environments_is_kept_out_of_the_json(tmp_path, capfd, backend):
    overrides = ["env.id=hostile_envs:Hostile-v0", "env.kwargs.where=step", "env.kwargs.harm=print"]
    run, _, _ = warm.run(tmp_path, *overrides, f"env.backend={backend}", "total_steps=100")
    capfd.readouterr()
    main([str(run), "--env", "id=hostile_envs:Hostile-v0", "--episodes=2", "--json"])
    out, err = capfd.readouterr()
    assert json.loads(out)["lengths"] == [20, 20]
    assert err.count("hello") == 40


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_failures_of_environments_are_logged_without_escape_sequences(dqn, capfd, backend):
    overrides = ["id=hostile_envs:Hostile-v0", "kwargs.where=some steps", "kwargs.harm=escape"]
    overrides += ["kwargs.numbers=4", f"backend={backend}", "max_restarts=1000"]
    main([str(dqn[0]), *(f"--env={each}" for each in overrides), "--episodes=8", "--json"])
    out, err = capfd.readouterr()
    assert json.loads(out)["episodes"] == 8
    assert err.count("rebuilding it") >= 2 and "owned" in err
    assert "Traceback" not in err and not set("\x1b\x07") & set(out + err)


@pytest.mark.parametrize(
    "metadata", [{"spec": None}, {"spec": {}}, {"weights": None}, {"step": "x"}]
)
def test_incomplete_manifests_are_rejected_in_one_line(dqn, tmp_path, metadata, capsys):
    shutil.copytree(dqn[0] / "policy", tmp_path / "policy")
    manifest = json.loads((tmp_path / "policy" / "manifest.json").read_text())
    manifest["metadata"] |= metadata
    manifest["sha256"] = self_hash(manifest)
    (tmp_path / "policy" / "manifest.json").write_text(json.dumps(manifest))
    try:
        main([str(tmp_path / "policy")])
    except SystemExit as end:
        assert end.code == 3
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert ("error: " in captured.err) == ("step" not in metadata)


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_the_score_equals_the_runs_final_score_exactly(algorithm, request, evaluate):
    run, summary = request.getfixturevalue(algorithm)
    found = evaluate(run)
    for key in ("mean", "std"):
        assert found[f"return_{key}"] == summary[f"eval_return_{key}"]
    assert found["episodes"] == len(found["returns"]) == summary["eval_episodes"]
    assert found["step"] == summary["steps"]
    assert evaluate(run, "--best", "--seed", 0)["return_mean"] == summary["best_eval_return_mean"]
    assert evaluate(run / "policy")["return_mean"] == summary["eval_return_mean"]


def test_policies_compute_in_the_precision_of_training(dqn, evaluate, monkeypatch):
    run, prepared = dqn[0], []
    monkeypatch.setattr(hardware, "prepare_device", lambda *given: prepared.append(given))
    evaluate(run)
    ((settings, device),) = prepared
    assert (settings.precision, device.type) == ("float32", "cpu")


def test_evaluating_builds_no_trainer(dqn, evaluate, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a trainer was built")

    for agent in (DQN, PPO):
        monkeypatch.setattr(agent, "__init__", refuse)
    assert evaluate(dqn[0])["episodes"] == 3


@pytest.mark.parametrize("options", [(), ("--sample",)])
def test_the_seed_determines_the_episodes(dqn, evaluate, options):
    run, _ = dqn
    first = evaluate(run, "--episodes", 12, "--seed", 5, *options)
    assert len(first["lengths"]) == 12
    assert evaluate(run, "--episodes", 12, "--seed", 5, *options) == first
    assert evaluate(run, "--episodes", 12, "--seed", 6, *options)["returns"] != first["returns"]


def test_environments_flush_subnormals_as_in_training(dqn, evaluate, monkeypatch):
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


def test_text_output_equals_the_json(dqn, evaluate, capsys):
    run, summary = dqn
    low, high = evaluate(run)["return_ci95"]
    main([str(run)])
    text = capsys.readouterr().out
    assert f"return:   {summary['eval_return_mean']}, std {summary['eval_return_std']}" in text
    assert f"{low} to {high}" in text and "seed 0, greedy" in text


def test_the_environment_may_be_changed_within_the_same_spaces(dqn, evaluate, error_of):
    run, _ = dqn
    assert max(evaluate(run, "--env", "kwargs.max_episode_steps=4")["lengths"]) == 4
    line = error_of(run, "--env", "id=Acrobot-v1")
    assert "trained on CartPole-v1" in line
    assert "[4] float32 in training and [6] float32 now" in line
    assert "Discrete(n=2) in training and Discrete(n=3) now" in line
    assert "stack" not in line
    assert "4 of [4] float32 now" in error_of(run, "--env", "frame_stack=4")


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
        ("num_envs=3", "env.num_envs=3: has no effect"),
    ],
)
def test_invalid_env_overrides_are_rejected(dqn, error_of, override, reason):
    assert reason in error_of(dqn[0], "--env", override)


def test_paths_without_a_policy_are_rejected(dqn, tmp_path, error_of):
    run, _ = dqn
    assert "no such run" in error_of(tmp_path / "nowhere")
    assert "no such run" in error_of(tmp_path / ("x" * 300))
    near = run.with_name(f"{run.name}s")
    assert f"{near}: no such run or policy; did you mean {run}?" in error_of(near)
    assert "neither a run nor a policy" in error_of(tmp_path)
    assert "is a file" in error_of(run / "summary.json")
    assert "/: neither a run nor a policy" in error_of("/")
    assert "holds checkpoints; name one, such as " in error_of(run / "checkpoints")
    missing = error_of(run / "checkpoints" / "step-000000000007")
    assert "no such checkpoint; there are step-0000" in missing
    assert f"did you mean {run}?" in error_of(run.parent)
    unfinished = tmp_path / "begun"
    unfinished.mkdir()
    (unfinished / "config.yaml").touch()
    assert "did not finish" in error_of(unfinished)
    assert "was never evaluated" in error_of(unfinished, "--best")
    (unfinished / "summary.json").write_text('{"status": "finished"}')
    assert f"{unfinished}: has no policy/: it was removed" in error_of(unfinished)
    saved = unfinished / "checkpoints" / "step-000000000007"
    saved.mkdir(parents=True)
    assert f"it was removed; name a checkpoint, such as {saved}" in error_of(unfinished)


def test_missing_and_invalid_keys_of_a_policy_are_rejected_by_name(dqn):
    """Policies of other formats are rejected as a whole (test_formats.py)."""
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


def test_a_damaged_policy_ends_with_3(dqn, tmp_path, error_of):
    run, _ = dqn
    broken = tmp_path / "policy"
    broken.mkdir()
    for file in (run / "policy").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "policy.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "is damaged" in error_of(broken, code=3)
    (broken / "manifest.json").write_text("{}")
    assert "is damaged" in error_of(broken, code=3)
    (broken / "manifest.json").unlink()
    assert "has no manifest.json" in error_of(broken, code=3)


@pytest.mark.parametrize("file", ["manifest.json", "policy.safetensors"])
def test_the_other_policy_is_named_where_one_is_damaged(dqn, tmp_path, error_of, file):
    run = tmp_path / "run"
    shutil.copytree(dqn[0], run)
    damaged = run / "policy" / file
    damaged.write_bytes(damaged.read_bytes()[:-1])
    best = run / "policy-best"
    with pytest.raises(CheckpointError) as refused:
        read_policy(run)
    assert refused.value.details == (f"its run has another policy: {best}",)
    assert error_of(run, code=3, lines=2).endswith(f"its run has another policy: {best}\n")
    shutil.rmtree(best)
    assert "another policy" not in error_of(run, code=3)


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_running_run_is_evaluated_with_a_note(dqn, tmp_path, error_of, capsys):
    running = tmp_path / "going"
    (running / "policy-best").mkdir(parents=True)
    (running / "config.yaml").touch()
    command_line = [sys.executable, "-c", HOLD, str(running / ".lock")]
    holder = subprocess.Popen(command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        (running / "policy-best").rmdir()
        assert "no policy yet" in error_of(running)
        (dqn[0] / "policy-best").rename(running / "policy-best")
        try:
            main([str(running)])
        finally:
            (running / "policy-best").rename(dqn[0] / "policy-best")
    finally:
        holder.communicate()
    out, err = capsys.readouterr()
    assert "return: " in out
    assert "is still running: its newest weights are in checkpoints/" in err
    assert "using policy-best/" in err


@pytest.mark.parametrize("name", ["film.avi", "nowhere/film.mp4", "."])
def test_invalid_video_paths_are_rejected(dqn, tmp_path, error_of, name):
    assert "--video" in error_of(dqn[0], "--video", tmp_path / name)


def test_the_missing_video_extra_is_named(dqn, tmp_path, error_of, monkeypatch):
    monkeypatch.setattr(video, "video_encoder_missing", lambda: True)
    line = error_of(dqn[0], "--video", tmp_path / "film.mp4")
    assert 'needs av to write videos, install it with: pip install -e ".[video]"' in line


def test_watching_needs_a_display(dqn, error_of, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    assert "no display" in error_of(dqn[0], "--watch")
    monkeypatch.setenv("DISPLAY", ":77")  # no such display
    assert "opens no window" in error_of(dqn[0], "--watch")


def test_watched_episodes_are_scored(dqn, evaluate, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # an invisible display
    found = evaluate(dqn[0], "--watch")
    assert found["episodes"] == 1 and found["lengths"] == [int(found["return_mean"])]


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_the_video_has_a_frame_of_every_observation(dqn, tmp_path, evaluate, suffix):
    av = pytest.importorskip("av")
    film = tmp_path / f"film.{suffix}"
    found = evaluate(dqn[0], "--video", film, "--episodes", 2)
    with av.open(str(film)) as container:
        frames = [(frame.width, frame.height) for frame in container.decode(video=0)]
    # One frame for the first observation of each episode, and one per step.
    assert frames == [(600, 400)] * (sum(found["lengths"]) + 2)
    assert len(found["lengths"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [film.name]


@pytest.mark.parametrize(
    "arguments",
    [(), ("--episodes", "0"), ("--seed", "-1"), ("--watch", "--video", "a.gif"), ("-x",)],
)
def test_invalid_arguments_are_rejected(dqn, error_of, arguments):
    given = arguments if not arguments else (dqn[0], *arguments)
    error_of(*given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the device")
def test_a_missing_device_is_named_by_its_option(dqn, error_of):
    line = error_of(dqn[0], "--device", "cuda", "--episodes", "1")
    assert line.startswith("error: --device=cuda: no CUDA device")
    assert line.endswith("; use --device cpu or --device auto\n")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--n-eval-episodes 5", "--n-eval-episodes: no such option; write --episodes N"),
        ("--n_eval_episodes=5", "--n_eval_episodes: no such option; write --episodes N"),
        ("-n 5", "-n: no such option; write --episodes N"),
        ("--deterministic", "--deterministic: no such option; actions are greedy unless --sample"),
        ("--episode 5", "--episode: no such option; did you mean --episodes?"),
        ("--xyz", "--xyz: no such option; there are: --best, --episodes, "),
    ],
)
def test_unknown_options_name_the_nearest(typed, hint):
    from steadyrl.core.errors import CommandError
    from steadyrl.training.cli.evaluate import parse

    with pytest.raises(CommandError) as refused:
        parse(["RUN", *typed.split()])
    assert str(refused.value).startswith(hint)


@pytest.mark.parametrize("trained", ["dqn", "ppo"])
def test_a_checkpoint_is_evaluated_like_the_policy_of_its_step(trained, request, evaluate):
    run, summary = request.getfixturevalue(trained)
    saved = sorted((run / "checkpoints").iterdir())
    assert evaluate(saved[-1])["return_mean"] == pytest.approx(summary["eval_return_mean"])
    policies = [read_policy(run), read_policy(run, best=True)]
    there = {policy.metadata["step"]: policy.weights for policy in policies}
    compared = 0
    for path in saved:
        found = read_policy(path)
        expected = there.get(found.metadata["step"], {})
        compared += bool(expected)
        assert all(torch.equal(found.weights[name], expected[name]) for name in expected)
        assert evaluate(path)["step"] == found.metadata["step"]
    assert compared


def test_a_damaged_checkpoint_is_not_evaluated(dqn, tmp_path, error_of):
    copy = tmp_path / "step-000000000600"
    shutil.copytree(max((dqn[0] / "checkpoints").iterdir()), copy)
    data = bytearray((copy / "agent.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "agent.safetensors").write_bytes(data)
    assert "damaged" in error_of(copy, code=3)
