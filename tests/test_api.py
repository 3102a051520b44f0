"""The Python API: `steadyrl.load` and the policy's `act` and `reset`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import warm
from command import environment
from example_spaces import LENGTH
from masked_envs import foretold
from remote_tensor import Remote

import steadyrl
from steadyrl.core.errors import ExpectedError, SettingError
from steadyrl.envs.backends.single_env import episode_seed
from steadyrl.envs.encoding.spaces import observation_encoder
from steadyrl.training.checkpoints.manifest import MANIFEST, self_hash
from steadyrl.training.cli.evaluate import main
from steadyrl.training.cli.policy_files.export import main as export_policy
from steadyrl.training.config.seeds import derive_seeds
from steadyrl.training.policies.policy import build_policy_module, read_policy

ROOT = Path(__file__).parent.parent
ENVS = ("env.num_envs=2", "device=cpu", "agent.compile=false", "seed=0", "total_steps=256")
PPO = (
    "agent=ppo", "agent.hidden=[16]", "agent.rollout_steps=64", "agent.epochs=1",
    "agent.minibatches=2", "agent.normalize_obs=true", "eval.episodes=1",
)  # fmt: skip
DQN = ("agent=dqn", "agent.hidden=[16]", "agent.learning_starts=64", "eval.episodes=1")
GRU = ("agent.recurrent.cell=gru", "agent.recurrent.sequence_length=8")
RUNS = {
    "normalised": (*PPO, "env=pendulum"),
    "recurrent": (*PPO, *GRU, "env=pendulum"),
    "discrete": (*PPO, "env=frozenlake", "agent.normalize_obs=false"),
    "stacked": (*PPO, "env=cartpole", "env.frame_stack=3"),
    "dqn": (*DQN, "env=cartpole"),
    "distilled": (*PPO, "env=cartpole", "agent.teacher.policy=pole_teacher:Pole"),
    "distilled dqn": (*DQN, "env=cartpole", "agent.teacher.policy=pole_teacher:Pole"),
}
SHOWN = ("dict", "tuple", "bytes", "grey bytes", "multi binary", "discrete")
DOORS = "id=masked_envs:Doors-v0"
LOADED = {**RUNS, "masked": (*PPO, f"env.{DOORS}")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that returns the run of that name, trained once."""
    runs = {}

    def run(name):
        if name not in runs:
            folder = tmp_path_factory.mktemp(name)
            runs[name] = Path(warm.run(folder, *ENVS, *LOADED[name], quick=False)[0])
        return runs[name]

    return run


def config_of(policy):
    return policy.metadata["config"]


def played(policy, seed):
    """Play one episode with the policy; return its return and length."""
    env = config_of(policy)["env"]
    made = gym.make(env["id"], **env["kwargs"])
    obs, info = made.reset(seed=seed)
    policy.reset()
    score, length, over = 0.0, 0, False
    while not over:
        action = policy.act(obs, info=info)
        assert made.action_space.contains(action)
        obs, reward, terminated, truncated, info = made.step(action)
        score, length, over = score + float(reward), length + 1, terminated or truncated
    return score, length


def shown_policy(tmp_path, kind):
    """Return the policy of a run in an environment with observations of this kind."""
    shown = ("env.id=example_spaces:Show-v0", f"env.kwargs.kind='{kind}'", "total_steps=128")
    small = [o for o in (*ENVS, *PPO) if not o.startswith(("total", "agent.normalize_obs"))]
    overrides = [*small, *shown, "eval.every=0", f"run_dir={tmp_path / 'run'}"]
    return steadyrl.train(overrides, quiet=True).policy


@pytest.mark.parametrize("kind", SHOWN)
def test_observations_of_every_kind_are_taken_as_the_environment_gives_them(tmp_path, kind):
    policy = shown_policy(tmp_path, kind)
    space = policy.observation_space
    space.seed(0)
    single = [space.sample() for _ in range(3)]
    batch = gym.vector.utils.concatenate(
        space, single, gym.vector.utils.create_empty_array(space, 3)
    )
    assert policy.act(batch).tolist() == [policy.act(each) for each in single]
    if kind == "discrete":
        with pytest.raises(SettingError, match="obs=float32: observation is float32"):
            policy.act(np.float32(0.5))
    # Not as its file describes it:
    built = steadyrl.load(tmp_path / "run", env=["id=example_spaces:Show-v0"])
    assert (space, policy.action_space) == (built.observation_space, built.action_space)
    assert built.act(batch).tolist() == policy.act(batch).tolist()
    spec = policy.metadata["spec"]
    network = build_policy_module(read_policy(tmp_path / "run"))[0]
    encoder = observation_encoder(space)
    frames = np.zeros((3, *spec["frame_shape"]), spec["dtype"])
    for each, frame in zip(single, frames, strict=True):
        encoder.write(each, frame)
    assert policy.act(batch).tolist() == network(torch.from_numpy(frames)).tolist()
    assert steadyrl.evaluate(policy, episodes=2).lengths == (LENGTH, LENGTH)


def test_batches_whose_parts_do_not_fit_each_other_are_refused(tmp_path):
    policy = shown_policy(tmp_path, "dict")
    single = policy.observation_space.sample()
    name, *others = single
    batch = {key: np.stack([part, part]) for key, part in single.items()}
    for wrong in (
        {name: batch[name]},
        {**batch, **{key: batch[key][:1] for key in others}},
        {name: batch[name], **{f"other {key}": batch[key] for key in others}},
    ):
        with pytest.raises(SettingError, match="obs=dict: "):
            policy.act(wrong)


def test_images_that_are_not_finite_are_refused(tmp_path):
    policy = shown_policy(tmp_path, "float")
    image = policy.observation_space.sample()
    image[0, 0, 0] = np.nan
    with pytest.raises(SettingError, match="not finite"):
        policy.act(image)


def observations(policy, n, seed=0):
    space = policy.observation_space
    space.seed(seed)
    return np.stack([space.sample() for _ in range(n)])


@pytest.mark.parametrize("name", RUNS)
def test_an_episode_is_that_of_the_evaluation(trained, capsys, name):
    main([str(trained(name)), "--episodes=1", "--json"])
    scored = json.loads(capsys.readouterr().out)
    policy = steadyrl.load(trained(name) / "policy")
    seed = episode_seed(derive_seeds(config_of(policy)["seed"]).evaluation, 0, 0)
    score, length = played(policy, seed)
    assert [length] == scored["lengths"]
    assert score == pytest.approx(scored["returns"][0], rel=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_a_batch_equals_single_observations(trained, name):
    policy = steadyrl.load(trained(name))
    first, second = observations(policy, 4), observations(policy, 4, seed=1)
    batch = policy.act(first), policy.act(second)
    for i in range(4):
        policy.reset()
        for row, whole in zip((first, second), batch, strict=True):
            alone = policy.act(row[i])
            assert np.shape(alone) == policy.action_space.shape
            np.testing.assert_allclose(alone, whole[i], rtol=1e-5, atol=1e-6)


def test_reset_begins_the_named_episodes_anew(trained):
    policy = steadyrl.load(trained("recurrent"))
    obs = observations(policy, 2)
    begun = policy.act(obs)
    for _ in range(3):
        later = policy.act(obs)
    assert (later != begun).all()
    policy.reset([True, False])
    third = policy.act(obs)
    assert third[0] == begun[0] and third[1] != begun[1]
    policy.reset()
    assert (policy.act(obs) == begun).all()
    with pytest.raises(SettingError, match="the last batch was of 2"):
        policy.reset([True])


def test_sampled_and_greedy_steps_are_of_one_episode(trained):
    """Memory depends on the observations alone, whatever the actions are."""
    policy, greedy, sampled = (steadyrl.load(trained("recurrent")) for _ in range(3))
    obs = [observations(policy, 2) * scale for scale in (1, -2, 3, -1, 2)]
    expected = [greedy.act(each) for each in obs]
    drawn = [sampled.act(each, deterministic=False) for each in obs]
    mixed = [policy.act(each, deterministic=i in (0, 2, 4)) for i, each in enumerate(obs)]
    for i in (0, 2, 4):
        np.testing.assert_array_equal(mixed[i], expected[i])
    assert not np.array_equal(mixed[1], drawn[0]) and not np.array_equal(mixed[1], expected[1])
    one = policy.act(obs[0][0], deterministic=False)  # another N begins new episodes
    assert np.shape(one) == policy.action_space.shape
    policy.reset()
    np.testing.assert_array_equal(policy.act(obs[0][0]), greedy.act(obs[0][0]))


def test_a_result_has_one_policy(tmp_path):
    small = (*PPO, *GRU, "env=pendulum", "env.num_envs=2", "agent.compile=false", "device=cpu")
    result = steadyrl.train([*small, "total_steps=128", f"run_dir={tmp_path / 'run'}"], quiet=True)
    obs, kept = observations(result.policy, 1)[0], steadyrl.load(result.directory)
    for _ in range(3):
        np.testing.assert_array_equal(result.policy.act(obs), kept.act(obs))
    for use in (steadyrl.load, steadyrl.read, steadyrl.evaluate):
        with pytest.raises(SettingError, match=r"RunResult: is no path: write its \.directory$"):
            use(result)
        with pytest.raises(SettingError, match=r"NoneType: is no path$"):
            use(None)


@pytest.mark.parametrize("value", ["no", None, 1])
def test_switches_are_true_or_false(trained, value):
    policy = steadyrl.load(trained("normalised"))
    for call in (
        lambda: policy.act(observations(policy, 1)[0], deterministic=value),
        lambda: steadyrl.evaluate(policy, episodes=1, deterministic=value),
        lambda: steadyrl.load(trained("normalised"), best=value),
    ):
        with pytest.raises(SettingError, match="must be True or False"):
            call()
    policy.act(observations(policy, 1)[0], deterministic=np.True_)


def test_sampled_actions_follow_the_seed(trained):
    def drawn(seed):
        policy = steadyrl.load(trained("normalised"), seed=seed)
        obs = observations(policy, 4)
        return np.stack([policy.act(obs, deterministic=False) for _ in range(3)])

    assert (drawn(1) == drawn(1)).all()
    assert (drawn(1) != drawn(2)).any()
    assert (drawn(1)[0] != drawn(1)[1]).any()


def test_tensors_of_any_device_are_acted_on(trained):
    policy = steadyrl.load(trained("normalised"))
    seen = observations(policy, 3)
    there = torch.from_numpy(seen).as_subclass(Remote)
    np.testing.assert_array_equal(policy.act(there), policy.act(seen))
    policy.reset(torch.ones(3, dtype=torch.bool).as_subclass(Remote))


def test_batches_of_changing_sizes_have_random_numbers_of_their_own(trained):
    policy = steadyrl.load(trained("normalised"))
    sizes, seen = [1, 2] * 20, observations(policy, 2)
    actions = [policy.act(seen[:n], deterministic=False)[0].tolist() for n in sizes]
    assert len(set(map(str, actions[::2]))) > 1


def test_masked_policies_take_allowed_actions_only(tmp_path):
    run, _, _ = warm.run(tmp_path, *ENVS, *PPO, f"env.{DOORS}", quick=False)
    policy = steadyrl.load(run, env=[DOORS])
    obs = observations(policy, 8)
    count = int(policy.action_space.n)
    masks = np.stack([foretold(0, i, count) for i in range(8)])
    masks[~masks.any(axis=1), 0] = True
    for deterministic in (True, False):
        taken = policy.act(obs, mask=masks, deterministic=deterministic)
        assert masks[np.arange(8), taken - policy.action_space.start].all()
    as_lists = np.empty(8, object)
    as_lists[:] = masks.tolist()
    assert (policy.act(obs, info={"action_mask": as_lists}) == policy.act(obs, mask=masks)).all()
    ended = policy.act(obs, mask=np.where(np.arange(8)[:, None] == 3, 0, masks))
    assert np.delete(ended, 3).tolist() == np.delete(policy.act(obs, mask=masks), 3).tolist()
    one = policy.act(obs[0], info={"action_mask": masks[0]})
    assert one == policy.act(obs[0], mask=masks[0])
    with pytest.raises(SettingError, match="needs the allowed actions"):
        policy.act(obs)
    with pytest.raises(SettingError, match="allows no action"):
        policy.act(obs[0], mask=np.zeros(count))


@pytest.mark.parametrize("name", RUNS)
def test_evaluate_gives_what_the_command_gives(trained, capsys, name):
    main([str(trained(name)), "--episodes=3", "--seed=5", "--json"])
    scored = json.loads(capsys.readouterr().out)
    policy = steadyrl.load(trained(name))
    begun = policy.act(observations(policy, 1)[0])
    found = steadyrl.evaluate(policy, episodes=3, seed=5)
    assert [round(each, 6) for each in found.returns] == scored["returns"]
    assert list(found.lengths) == scored["lengths"]
    assert found == steadyrl.evaluate(trained(name), episodes=3, seed=5)
    policy.reset()
    assert (policy.act(observations(policy, 1)[0]) == begun).all()  # its own state is untouched


def test_evaluate_samples_and_changes_the_environment(trained):
    policy = steadyrl.load(trained("normalised"))
    greedy = steadyrl.evaluate(policy, episodes=2)
    assert steadyrl.evaluate(policy, episodes=2, deterministic=False).returns != greedy.returns
    assert steadyrl.evaluate(policy, env=["kwargs.g=1"], episodes=2).returns != greedy.returns
    lighter = steadyrl.load(trained("normalised"), env=["kwargs.g=1"])
    changed = steadyrl.evaluate(policy, env=["kwargs.g=1"], episodes=2)
    assert steadyrl.evaluate(lighter, episodes=2) == changed
    with pytest.raises(SettingError, match=r"episodes=0: must be 1 or more"):
        steadyrl.evaluate(policy, episodes=0)
    with pytest.raises(SettingError, match=r"episodes=2.5: must be a whole number"):
        steadyrl.evaluate(policy, episodes=2.5)
    with pytest.raises(SettingError, match=r"episodes=True: must be a whole number"):
        steadyrl.evaluate(policy, episodes=True)
    assert steadyrl.evaluate(policy, episodes=np.int64(2)) == greedy
    with pytest.raises(SettingError, match="was trained on Pendulum"):
        steadyrl.evaluate(policy, env=["id=CartPole-v1"])
    with pytest.raises(SettingError, match=r"env\.num_envs=7: has no effect"):
        steadyrl.evaluate(policy, env=["num_envs=7"])


def test_read_gives_configuration_metrics_and_summary(trained, tmp_path):
    run = steadyrl.read(trained("normalised"))
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").open()]
    assert run.metrics["step"].tolist() == [line["step"] for line in lines]
    for tag, values in run.metrics.items():
        assert [None if np.isnan(value) else value for value in values] == [
            line.get(tag) for line in lines
        ]
    assert set(run.metrics) == set().union(*lines)
    assert run.config["agent.hidden"] == [16] and run.summary["status"] == "finished"
    assert not run.is_running
    frame = pytest.importorskip("pandas") and run.frame()
    assert frame.index.tolist() == run.metrics["step"].tolist()
    assert len(frame.columns) == len(run.metrics) - 1
    with pytest.raises(ExpectedError, match="no such run"):
        steadyrl.read(tmp_path / "none")


def test_a_policy_of_a_vector_environment_loads(tmp_path):
    own = "env.id=toy_environments:OnlyBatch-v0"
    result = steadyrl.train([*ENVS, *PPO, own, f"run_dir={tmp_path / 'run'}"], quiet=True)
    policy = result.policy
    assert policy.observation_space.shape == (3,) and policy.action_space.n == 3
    assert policy.act(np.zeros((2, 3), np.float32)).shape == (2,)
    assert steadyrl.evaluate(policy, episodes=2).episodes == 2


def test_a_policy_of_an_atari_game_takes_ales_frames(tmp_path):
    pytest.importorskip("ale_py")
    small = ("agent=ppo", "env=atari", "env.id=ALE/Pong-v5", "agent.network.encoder=mlp")
    sizes = ("agent.hidden=[8]", "agent.rollout_steps=16", "agent.epochs=1", "agent.minibatches=2")
    rest = (*ENVS[:4], "total_steps=64", "eval.every=0", "env.kwargs.num_threads=1")
    result = steadyrl.train([*small, *sizes, *rest, f"run_dir={tmp_path / 'run'}"], quiet=True)
    policy = result.policy
    assert policy.observation_space.shape == (84, 84) and policy.action_space.n == 6
    frames = [policy.observation_space.sample() for _ in range(5)]
    actions = [policy.act(frame) for frame in frames]
    assert all(policy.action_space.contains(action) for action in actions)
    network = build_policy_module(read_policy(tmp_path / "run"))[0]
    stack = torch.from_numpy(np.stack(frames[-4:]))[None]
    assert network(stack).item() == actions[-1]


def test_errors_are_one_line(trained, tmp_path):
    policy = steadyrl.load(trained("normalised"))
    for wrong in (np.zeros(2), np.zeros((2, 5)), "text", None):
        with pytest.raises(SettingError, match="obs") as caught:
            policy.act(wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(SettingError, match="without action masks"):
        policy.act(np.zeros(3), mask=[1])
    with pytest.raises(SettingError, match="seed=-1: must be 0 or more"):
        steadyrl.load(trained("normalised"), seed=-1)
    with pytest.raises(SettingError, match=r"seed=0.5: must be a whole number"):
        steadyrl.load(trained("normalised"), seed=0.5)
    with pytest.raises(ExpectedError, match="no such run or policy"):
        steadyrl.load(tmp_path / "none")


LIGHT = """
import sys, steadyrl
light = set(sys.modules)
assert not light & {"torch", "numpy", "gymnasium", "omegaconf"}, light
policy = steadyrl.load(sys.argv[1])
obs = policy.observation_space.sample()
mask = [1] * policy.action_space.n if policy.metadata["spec"].get("mask") else None
for deterministic in (True, False):
    policy.act(obs, mask=mask, deterministic=deterministic)
heavy = {
    "hydra", "tensorboard", "numba", "llvmlite", "scipy", "sympy", "matplotlib", "steadyrl.loop",
    "steadyrl.training.setup", "steadyrl.agents.learner.learner", "steadyrl.core.jit",
    "steadyrl.buffers.replay.buffer", "steadyrl.buffers.rollout.buffer", "masked_envs",
}
found = heavy & set(sys.modules)
assert not found, found
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["dqn", "normalised", "recurrent", "distilled", "masked"])
def test_importing_is_light_and_loading_imports_no_trainer(trained, name):
    here = {**environment(), "PYTHONPATH": str(ROOT)}  # the environment's package is not there
    subprocess.run([sys.executable, "-c", LIGHT, str(trained(name))], check=True, env=here)


def with_spaces(policy, folder, spaces):
    """Return a copy of a policy whose file describes its spaces so; None: not at all."""
    copied = Path(shutil.copytree(policy, folder))
    manifest = json.loads((copied / MANIFEST).read_text())
    manifest["metadata"]["spaces"] = spaces
    manifest["sha256"] = self_hash(manifest)
    (copied / MANIFEST).write_text(json.dumps(manifest))
    return copied


@pytest.mark.parametrize("name", ["normalised", "discrete", "stacked", "masked"])
def test_spaces_come_from_the_file_or_from_the_environment(trained, tmp_path, name):
    policy = trained(name) / "policy"
    own = [DOORS] if name == "masked" else []
    described, built = steadyrl.load(policy), with_spaces(policy, tmp_path / "built", None)
    if own:
        with pytest.raises(ExpectedError, match="masked_envs:Doors-v0 imports a module"):
            steadyrl.load(built)
        with pytest.raises(ExpectedError, match="masked_envs:Doors-v0 imports a module"):
            steadyrl.evaluate(described, episodes=1)
    found = steadyrl.load(built, env=own)
    assert (found.observation_space, found.action_space) == (
        described.observation_space,
        described.action_space,
    )
    obs = observations(found, 3)
    mask = np.ones((3, found.action_space.n)) if own else None
    assert found.act(obs, mask=mask).tolist() == described.act(obs, mask=mask).tolist()


def test_spaces_of_a_strangers_file_are_checked(trained, tmp_path):
    policy = trained("discrete") / "policy"
    plain = json.loads((policy / MANIFEST).read_text())["metadata"]["spaces"]
    sixteen = plain["observation"]
    assert sixteen["n"] == 16
    for number, (seen, reason) in enumerate([
        ({**sixteen, "n": 10**15}, "its spaces cannot be read: a size is"),
        ({**sixteen, "n": 17}, r"observations \[16\] float32 in training and \[17\]"),
        ({"kind": "Discrete", "n": 16}, "its spaces cannot be read: .*start"),
        ([[[]]], "its spaces cannot be read"),
    ]):  # fmt: skip
        wrong = with_spaces(policy, tmp_path / str(number), {**plain, "observation": seen})
        with pytest.raises(ExpectedError, match=reason) as caught:
            steadyrl.load(wrong)
        assert "\n" not in str(caught.value)


def test_the_pages_examples_run(trained, tmp_path, monkeypatch, capsys):
    pages = [ROOT / "README.md", ROOT / "docs" / "quickstart.md", ROOT / "docs" / "python.md"]
    of = [re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in pages]
    assert [len(examples) for examples in of] == [1, 1, 6]
    short = ('"total_steps=20_000"', f"*{[*ENVS, *PPO[1:]]}")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(of[0][0].replace(*short), names)
    exec(of[1][0].replace('"RUN"', "result.directory"), names)
    for example in of[2]:
        exec(example.replace(*short).replace('"RUN"', repr(str(trained("normalised")))), names)
    assert names["result"].directory.is_relative_to(tmp_path / "outputs" / "CartPole-v1")
    assert names["actions"].shape == (4, 1)


def test_the_pages_example_of_an_onnx_file_runs(trained, tmp_path, monkeypatch):
    for module in ("onnx", "onnxruntime"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    export_policy([str(trained("normalised")), "--onnx", "policy.onnx"])
    page = (ROOT / "docs" / "commands.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(example, names)
    policy = steadyrl.load(trained("normalised"))
    expected = policy.act(names["obs"][np.newaxis])
    (actions,) = names["policy"].run(None, {"observation": names["obs"][np.newaxis]})
    np.testing.assert_allclose(actions, expected, atol=1e-5)


def test_wrong_environment_settings_are_refused_with_what_to_write(trained):
    run = trained("normalised")
    with gym.make("Pendulum-v1") as env:
        for use in (steadyrl.load, steadyrl.evaluate):
            with pytest.raises(SettingError, match=r"must be a list.*env=\['kwargs\.g=5'\]"):
                use(run, env=env)
    for given in ("kwargs.g=7", {"kwargs.g": 7}):
        for use, what in ((steadyrl.load, run), (steadyrl.evaluate, steadyrl.load(run))):
            with pytest.raises(SettingError, match=r"env=\['kwargs\.g=7'\]"):
                use(what, env=given)


def test_a_policy_says_what_it_is(trained):
    policy = steadyrl.load(trained("normalised"))
    steps = f"{policy.metadata['step']:,}"
    assert repr(policy) == f"<PPO policy of Pendulum-v1 after {steps} steps>"


def test_predict_is_called_act(trained):
    policy = steadyrl.load(trained("normalised"))
    with pytest.raises(AttributeError, match=r"'predict'; write act\(obs\)"):
        policy.predict(np.zeros(3))
    assert not hasattr(policy, "other")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [np.nan, np.inf, 1e300])
def test_observations_that_are_not_finite_are_refused(trained, number):
    policy = steadyrl.load(trained("normalised"))
    with pytest.raises(SettingError, match="holds NaN, infinity or a number beyond float32"):
        policy.act(np.array([[0.0, 1.0, 0.0], [0.0, number, 0.0]]))


def test_other_keys_of_a_run_are_refused_with_the_nearest(trained):
    found = steadyrl.read(trained("normalised"))
    for given, near in [
        ("agent", "keys are flat, such as agent."), ("hidden", "such as agent.hidden"),
        ("total_step", "did you mean total_steps"),
    ]:  # fmt: skip
        with pytest.raises(KeyError, match=near):
            found.config[given]
    with pytest.raises(KeyError, match="such as eval/return_mean"):
        found.metrics["return_mean"]
    assert found.config.get("agent") is None and "agent" not in found.config
