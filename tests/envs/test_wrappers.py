"""Wrappers are around every environment, in their order, or refused in a line."""

import json

import numpy as np
import pytest
import warm
from toy_environments import settings

from steadyrl.core.errors import SettingError
from steadyrl.envs.factory import build_env, build_render_env, choose_backend, probe
from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.checkpoints.resume import validate_no_foreign_modules
from steadyrl.training.cli.evaluate import command

CUT = {"TimeLimit": {"max_episode_steps": 3}}


def wrapped(*wrappers, env_id="CartPole-v1", **changes):
    return settings(env_id, wrappers=wrappers, **changes)


def rewards(env, steps=4):
    """Return the rewards, and which rows were truncated."""
    env.reset()
    given, truncated = [], []
    for _ in range(steps):
        row = env.step(np.zeros(env.spec.num_envs, int))
        given.append(float(row.reward[0]))
        truncated.append(bool(row.truncated[0]))
    return given, truncated


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("order", "reward"),
    [
        (({"ClipReward": {"max_reward": 0.5}}, "own_wrappers:Scaled"), 1.0),
        (({"own_wrappers:Scaled": {"factor": 4}}, {"ClipReward": {"max_reward": 0.5}}), 0.5),
        (({"own_wrappers:Scaled": None},), 2.0),
    ],
)
def test_they_stand_in_their_order(backend, order, reward):
    with build_env(wrapped(*order, CUT, backend=backend, num_envs=2), seed=0) as env:
        given, truncated = rewards(env)
    assert given == [reward] * 3 + [0.0]
    assert truncated == [False, False, True, False]


def test_they_change_what_there_is_to_see():
    spec = probe(wrapped("TimeAwareObservation"))
    assert spec.frame_shape == (5,)


def test_what_is_shown_has_them_too(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown = wrapped("own_wrappers:Scaled", CUT).for_rendering(
        video=None, episodes=1, max_episode_steps=9
    )
    with build_render_env(shown, seed=0) as env:
        assert rewards(env, 3) == ([2.0] * 3, [False, False, True])


def test_evaluation_has_them_too():
    with build_env(wrapped(CUT).for_evaluation(), seed=0) as env:
        assert rewards(env)[1] == [False, False, True, False]


def test_a_saved_episode_goes_on_within_them():
    with build_env(wrapped(CUT), seed=0) as env:
        env.reset()
        env.step(np.zeros(1, int))
        state = env.state_dict()
    with build_env(wrapped(CUT), seed=0) as env:
        env.load_state_dict(state)
        assert not env.step(np.zeros(1, int)).truncated[0]
        assert env.step(np.zeros(1, int)).truncated[0]


def test_the_fastest_backend_that_can_have_them_is_chosen():
    many = {"num_envs": 16, "backend": "auto"}
    assert choose_backend(settings("CartPole-v1", **many))[0] == "kernel"
    assert choose_backend(wrapped(CUT, env_id="CartPole-v1", **many))[0] in ("sync", "async")
    assert choose_backend(settings(**many))[0] == "native"
    assert choose_backend(wrapped(CUT, **many))[0] in ("sync", "async")


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_batches_are_not_wrapped(backend):
    with pytest.raises(SettingError, match=rf"wrappers=TimeLimit: backend {backend} steps all"):
        probe(wrapped(CUT, backend=backend))


def test_kernels_are_not_wrapped():
    with pytest.raises(SettingError, match="wrappers=TimeLimit: backend kernel steps all"):
        probe(wrapped(CUT, env_id="CartPole-v1", backend="kernel"))


def test_atari_games_are_not_wrapped():
    pytest.importorskip("ale_py")
    game = wrapped(CUT, env_id="ALE/Pong-v5", backend="auto")
    with pytest.raises(SettingError, match="wrappers=TimeLimit: backend ale steps all"):
        probe(game)
    with pytest.raises(SettingError, match="backend ale"):
        build_render_env(game.for_rendering(video=None, episodes=1, max_episode_steps=9), seed=0)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("TimeLimi", "wrappers=TimeLimi: not in gymnasium.wrappers; did you mean TimeLimit?"),
        ("Autoreset", "cannot be used: environments reset on the step after"),
        ("NormalizeObservation", "use agent.normalize_obs"),
        ({"TimeLimit": {"steps": 3}}, "unexpected keyword argument 'steps'"),
        ("TransformReward", "missing 1 required positional argument"),
        ("nowhere:Class", "cannot import nowhere"),
        ("own_wrappers:Nothing", "own_wrappers has no class Nothing"),
        ("own_wrappers:nothing", "returned a NoneType, not a gym.Env"),
        ("own wrappers:Scaled", "must be module:name"),
        ("", "write a name, or"),
        ({}, "write a name, or"),
        ({"TimeLimit": 3}, "write a name, or"),
        ({"TimeLimit": {}, "ClipReward": {}}, "write a name, or"),
    ],
)
def test_what_is_no_wrapper_is_refused(written, reason):
    with pytest.raises(SettingError, match="wrappers=") as refused:
        probe(wrapped(written))
    assert reason in str(refused.value)


def test_a_module_is_not_imported_because_something_saved_names_it(tmp_path):
    own = [CUT, {"own_wrappers:Scaled": {}}]
    saved = {"env": {"id": "CartPole-v1", "wrappers": own}}
    with pytest.raises(CheckpointError, match="own_wrappers:Scaled imports a module"):
        validate_no_foreign_modules(
            tmp_path, saved, {"env": {"id": "CartPole-v1", "wrappers": [CUT]}}
        )
    validate_no_foreign_modules(
        tmp_path, saved, {"env": {"id": "X", "wrappers": ["own_wrappers:Scaled"]}}
    )


def test_a_run_and_its_policy_keep_them(tmp_path, capsys):
    typed = r"env.wrappers=[{TimeLimit:{max_episode_steps:7}},{own_wrappers\:Scaled:{factor:3}}]"
    run, summary, _ = warm.run(tmp_path, "total_steps=300", "eval.every=300", typed)
    assert (summary["eval_return_mean"], summary["return_mean"]) == (21.0, 21.0)
    with pytest.raises(SystemExit) as refused:
        command([str(run)])
    assert refused.value.code == 3 and "imports a module" in capsys.readouterr().err
    again = "wrappers=[{TimeLimit: {max_episode_steps: 6}}, 'own_wrappers:Scaled']"
    command([str(run), "--json", "--env", again])
    assert json.loads(capsys.readouterr().out)["return_mean"] == 12.0
