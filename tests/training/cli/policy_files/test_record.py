"""`scripts/record.py`: episodes are those of an evaluation, and need only NumPy to be read."""

import json
import os
import subprocess
import sys
import zipfile
from contextlib import closing

import example_spaces
import gymnasium as gym
import numpy as np
import pytest
from example_spaces import LENGTH, SPACES, sample
from opened import job

from steadyrl.core.errors import SettingError
from steadyrl.envs.backends.single_env import episode_seed
from steadyrl.loop import train
from steadyrl.training.cli.evaluate import main as evaluate
from steadyrl.training.cli.policy_files.record import main
from steadyrl.training.evaluation.recording import EpisodeFile, RecordedEnvs, play_episodes

FEW = ("total_steps=300", "eval.every=150", "eval.episodes=5", "eval.num_envs=2", "eval.seed=7")
STEPS = ("observations", "actions", "rewards", "terminated", "truncated")
# Replays an episode in Gymnasium, without SteadyRL.
READ = """
import json, sys
import numpy as np, gymnasium as gym
assert "steadyrl" not in sys.modules
with np.load(sys.argv[1], allow_pickle=False) as file:
    about = json.loads(file["about"].item())
    returns = [float(file[name].sum()) for name in file.files if name.endswith("/rewards")]
print(json.dumps([about, returns]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    train(job(folder, *FEW))
    return folder / "run"


def recorded(path):
    """Return {episode: {name: array}} and what the file says of itself."""
    with np.load(path, allow_pickle=False) as file:
        found = {}
        for name in file.files:
            episode, _, part = name.partition("/")
            found.setdefault(episode, {})[part] = file[name]
    return json.loads(found.pop("about")[""].item()), found


def test_episodes_are_those_of_the_evaluation(run, tmp_path, capsys):
    main([str(run), "--out", str(tmp_path / "e.npz"), "--episodes", "5"])
    assert "e.npz: 5 episodes, " in capsys.readouterr().out
    evaluate([str(run), "--episodes", "5", "--json"])
    expected = json.loads(capsys.readouterr().out)
    about, episodes = recorded(tmp_path / "e.npz")
    assert [float(each["rewards"].sum()) for each in episodes.values()] == expected["returns"]
    assert [len(each["rewards"]) for each in episodes.values()] == expected["lengths"]
    assert (about["format"], about["episodes"], about["env"]) == (2, 5, "CartPole-v1")
    for each in episodes.values():
        steps = len(each["actions"])
        assert set(each) == set(STEPS)
        assert each["observations"].shape == (steps + 1, 4)
        assert each["observations"].dtype == each["rewards"].dtype == np.float32
        over = each["terminated"] | each["truncated"]
        assert over.dtype == bool and over.tolist() == [False] * (steps - 1) + [True]


def test_a_program_without_steadyrl_reads_it(run, tmp_path):
    main([str(run), "--out", str(tmp_path / "e.npz"), "--episodes", "2"])
    done = subprocess.run(
        [sys.executable, "-I", "-c", READ, str(tmp_path / "e.npz")],
        capture_output=True,
        text=True,
        check=True,
    )
    about, returns = json.loads(done.stdout)
    assert about["episodes"] == len(returns) == 2


class Counting:
    """Takes the action 1, always."""

    def act(self, obs, starts):
        import torch

        class Decision:
            env_action = torch.ones(len(obs), dtype=torch.int64)

        return Decision


def played(settings, episodes, limit):
    found = []
    with closing(RecordedEnvs(settings, seed=3, num_envs=len(episodes))) as envs:
        play_episodes(envs, Counting(), episodes, max_episode_steps=limit, write=found.append)
    return found


def env_settings(*overrides):
    from steadyrl.training.cli.checks.envs import settings_of

    return settings_of("cartpole", ["env.backend=sync", *overrides], None)


def test_an_episode_at_the_limit_is_truncated_and_its_environment_ends():
    found = played(env_settings("env.num_envs=2"), [3, 3], 5)
    assert len(found) == 2
    for each in found:
        assert each["truncated"].tolist() == [False] * 4 + [True]
        assert not each["terminated"].any()


@pytest.mark.parametrize("stack", [1, 2])
def test_an_episode_is_what_gymnasium_gives_for_its_actions(stack):
    [one] = played(env_settings("env.num_envs=1", f"env.frame_stack={stack}"), [1], 100)
    env = gym.make("CartPole-v1")
    seen = [env.reset(seed=episode_seed(3, 0, 0))[0]]
    seen += [env.step(int(action))[0] for action in one["actions"]]
    assert np.array_equal(one["observations"], np.array(seen))


def flattened(name, value):
    """Return {name/part: array} of an observation."""
    if isinstance(value, dict | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in items for k, v in flattened(f"{name}/{key}", part).items()}
    return {name: np.asarray(value)}


def test_parts_of_one_name_are_refused():
    """An array for each part: none is lost."""
    envs = RecordedEnvs(env_settings("env.num_envs=1"), seed=0, num_envs=1)
    with closing(envs), pytest.raises(SettingError, match="be observations/a/b"):
        one = gym.spaces.Discrete(2)
        space = gym.spaces.Dict({"a/b": one, "a": gym.spaces.Dict(b=one)})
        envs._watch({"a/b": 0, "a": {"b": 1}}, space, 0)


@pytest.mark.parametrize("backend", ["sync", "async", "batch"])
@pytest.mark.parametrize("kind", SPACES)
def test_observations_are_recorded_as_the_environment_gives_them(kind, backend):
    from steadyrl.training.cli.checks.envs import settings_of

    overrides = [f"env.kwargs.kind='{kind}'", f"env.backend={backend}", "env.num_envs=2"]
    for each in played(settings_of("example_spaces:Show-v0", overrides, None), [1, 1], 50):
        shown = [flattened("observations", sample(kind, 0, time)) for time in range(LENGTH + 1)]
        assert each.keys() == {*shown[0], *STEPS[1:]}
        for name in shown[0]:
            expected = np.array([at[name] for at in shown])
            assert each[name].dtype == expected.dtype
            assert np.array_equal(each[name], expected)


@pytest.mark.parametrize(
    ("kind", "given"),
    [("vector", tuple), ("multi binary", lambda rows: tuple(map(tuple, rows))), ("tuple", list)],
)
def test_parts_are_those_of_the_space_however_an_observation_comes(monkeypatch, kind, given):
    from steadyrl.training.cli.checks.envs import settings_of

    settings = settings_of("example_spaces:Show-v0", [f"env.kwargs.kind='{kind}'"], None)
    [expected] = played(settings, [1], 50)
    monkeypatch.setattr(example_spaces, "sample", lambda *at: given(sample(*at)))
    [found] = played(settings, [1], 50)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array)


class Pushing(Counting):
    """Pushes harder than the environment's bounds allow."""

    def act(self, obs, starts):
        import torch

        class Decision:
            env_action = torch.full((len(obs), 1), 7.0)

        return Decision


def test_actions_are_those_that_the_environment_gets():
    from steadyrl.training.cli.checks.envs import settings_of

    found = []
    settings = settings_of("pendulum", [], None)
    with closing(RecordedEnvs(settings, seed=3, num_envs=1)) as envs:
        play_episodes(envs, Pushing(), [1], max_episode_steps=9, write=found.append)
    assert found[0]["actions"].tolist() == [[2.0]] * 9


def test_masks_are_arrays_of_their_own():
    from steadyrl.training.cli.checks.envs import settings_of

    overrides = ["env.kwargs.source=info", "env.kwargs.strict=false", "env.num_envs=2"]
    made = settings_of("masked_envs:StampedMasks-v0", overrides, None)
    found = played(made, [1, 1], 50)
    for each in found:
        steps = len(each["actions"])
        assert each["observations"].shape == (steps + 1, 2)
        assert each["action_masks"].shape[0] == steps + 1
        assert each["action_masks"].dtype == bool and each["action_masks"].any(axis=1).all()
        assert each["observations"][:, 0].tolist() == list(range(steps + 1))


def test_an_interrupted_recording_leaves_no_file(tmp_path):
    episode = dict.fromkeys(STEPS, np.zeros(3, np.float32))
    with pytest.raises(KeyboardInterrupt), EpisodeFile(tmp_path / "e.npz", {}) as file:
        file.write(episode)
        assert os.listdir(tmp_path) != []
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    with EpisodeFile(tmp_path / "e.npz", {}) as file:
        file.write(episode)
    assert os.listdir(tmp_path) == ["e.npz"]
    assert zipfile.ZipFile(tmp_path / "e.npz").testzip() is None


def test_a_full_disk_leaves_nothing_of_a_recording(small_disk):
    noise = np.random.default_rng(0).random(300_000)
    with (
        pytest.raises(OSError, match="No space left"),
        EpisodeFile(small_disk / "e.npz", {}) as file,
    ):
        file.write({"rewards": noise})
    assert os.listdir(small_disk) == []


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("--out", "e.txt"), 2, "must end in .npz"),
        (("--out", "there.npz"), 2, "exists already"),
        (("--out", "no/such/folder.npz"), 2, "no/such"),
        (("--out", "e.npz", "--episodes", "0"), 2, "must be 1 or more"),
        (("--out", "e.npz", "--env", "id=Pendulum-v1"), 2, "observation"),
    ],
)
def test_errors_are_one_line_and_write_nothing(
    run, tmp_path, monkeypatch, capsys, arguments, code, reason
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.npz").write_bytes(b"")
    with pytest.raises(SystemExit) as left:
        main([str(run), *arguments])
    assert left.value.code == code
    shown = capsys.readouterr().err
    assert reason in shown and len(shown.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.npz"]


def test_a_recording_without_a_file_is_refused_in_one_line(capsys):
    from steadyrl.training.cli.policy_files.record import main as record

    with pytest.raises(SystemExit) as left:
        record(["RUN"])
    assert left.value.code == 2
    line = "error: --out=: is missing: write --out episodes.npz\n"
    assert capsys.readouterr().err == line
