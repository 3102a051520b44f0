"""`env.wrappers`: order, evaluation, rendering, state, backends and invalid values."""

import json

import numpy as np
import pytest
import warm
from toy_environments import settings

from steadyrl.core.errors import SettingError
from steadyrl.envs.factory import build_env, build_render_env, choose_backend, probe
from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.checkpoints.resume import validate_no_foreign_modules
from steadyrl.training.cli.evaluate import main
from steadyrl.training.run.job import compose_one

CUT = {"TimeLimit": {"max_episode_steps": 3}}


def wrapped(*wrappers, env_id="CartPole-v1", **changes):
    return settings(env_id, wrappers=wrappers, **changes)


def rewards(env, steps=4):
    """Return rewards and truncations of the first environment."""
    env.reset()
    rewards_, truncated = [], []
    for _ in range(steps):
        step = env.step(np.zeros(env.spec.num_envs, int))
        rewards_.append(float(step.reward[0]))
        truncated.append(bool(step.truncated[0]))
    return rewards_, truncated


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("order", "reward"),
    [
        (({"ClipReward": {"max_reward": 0.5}}, "own_wrappers:Scaled"), 1.0),
        (({"own_wrappers:Scaled": {"factor": 4}}, {"ClipReward": {"max_reward": 0.5}}), 0.5),
        (({"own_wrappers:Scaled": None},), 2.0),
    ],
)
def test_wrappers_are_applied_in_order(backend, order, reward):
    with build_env(wrapped(*order, CUT, backend=backend, num_envs=2), seed=0) as env:
        rewards_, truncated = rewards(env)
    assert rewards_ == [reward] * 3 + [0.0]
    assert truncated == [False, False, True, False]


def test_wrappers_change_the_observation_space():
    spec = probe(wrapped("TimeAwareObservation"))
    assert spec.frame_shape == (5,)


def test_rendered_environments_are_wrapped(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    rendered = wrapped("own_wrappers:Scaled", CUT).for_rendering(
        video=None, episodes=1, max_episode_steps=9
    )
    with build_render_env(rendered, seed=0) as env:
        assert rewards(env, 3) == ([2.0] * 3, [False, False, True])


def test_evaluation_environments_are_wrapped():
    with build_env(wrapped(CUT).for_evaluation(), seed=0) as env:
        assert rewards(env)[1] == [False, False, True, False]


def test_the_state_of_wrappers_is_restored():
    with build_env(wrapped(CUT), seed=0) as env:
        env.reset()
        env.step(np.zeros(1, int))
        state = env.state_dict()
    with build_env(wrapped(CUT), seed=0) as env:
        env.load_state_dict(state)
        assert not env.step(np.zeros(1, int)).truncated[0]
        assert env.step(np.zeros(1, int)).truncated[0]


def test_auto_chooses_a_backend_that_supports_wrappers():
    many = {"num_envs": 16, "backend": "auto"}
    assert choose_backend(settings("CartPole-v1", **many))[0] == "kernel"
    assert choose_backend(wrapped(CUT, env_id="CartPole-v1", **many))[0] in ("sync", "async")
    assert choose_backend(settings(**many))[0] == "batch"
    assert choose_backend(wrapped(CUT, **many))[0] in ("sync", "async")


@pytest.mark.parametrize("backend", ["batch", "envpool"])
def test_vector_backends_reject_wrappers(backend):
    with pytest.raises(SettingError, match=rf"wrappers=TimeLimit: backend {backend} steps all"):
        probe(wrapped(CUT, backend=backend))


def test_kernels_reject_wrappers():
    with pytest.raises(SettingError, match="wrappers=TimeLimit: backend kernel steps all"):
        probe(wrapped(CUT, env_id="CartPole-v1", backend="kernel"))


def test_ale_rejects_wrappers():
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
        ("Mine", "gymnasium.wrappers; one of your own is written module:Mine; there are: "),
        ("my_package.mine.Scaled", "write my_package.mine:Scaled"),
        ("gymnasium.wrappers.TimeLimit", "wrappers; write TimeLimit"),
        ("Autoreset", "cannot be used: environments reset on the step after"),
        ("NormalizeObservation", "use agent.normalize_obs"),
        ({"TimeLimit": {"steps": 3}}, "unexpected keyword argument 'steps'"),
        ("TransformReward", "missing 1 required positional argument"),
        ("nowhere:Class", "cannot import nowhere"),
        ("gymnasium.wrappers:NormalizeReward", "cannot be used: scores would no longer be raw"),
        ("gymnasium.wrappers.common:Autoreset", "cannot be used: environments reset on the step"),
        ("own_wrappers:Nothing", "own_wrappers has no class Nothing"),
        ("own_wrappers:nothing", "returned a NoneType, not a gym.Env"),
        ("own wrappers:Scaled", "must be module:name"),
        ("", "write a name, or"),
        ({}, "write a name, or"),
        ({"TimeLimit": 3}, "write a name, or"),
        ({"TimeLimit": {}, "ClipReward": {}}, "write a name, or"),
    ],
)
def test_invalid_wrappers_are_rejected(written, reason):
    with pytest.raises(SettingError, match="wrappers=") as refused:
        probe(wrapped(written))
    assert reason in str(refused.value)


@pytest.mark.parametrize(("backend", "built"), [("sync", 1), ("async", 2)])
def test_a_wrapper_that_fails_while_it_is_rebuilt_is_rebuilt_again(backend, built, tmp_path):
    fused = {"own_wrappers:Fused": {"fuse": str(tmp_path / "fuse"), "before": built}}
    with build_env(wrapped(fused, backend=backend, max_restarts=2), seed=0) as env:
        env.reset()
        env.step(np.zeros(1, np.int64))
        seen = [bool(env.step(np.zeros(1, np.int64)).valid[0]) for _ in range(3)]
    assert len((tmp_path / "fuse").read_bytes()) == built + 2 and seen[-1]


def test_arguments_are_what_the_wrapper_takes():
    """Tuples from lists, and functions and other objects by module:name."""
    sized = {"shape": [2, [3, 4]], "names": ["a", "b"], "place": "own_wrappers:negated"}
    functions = (
        {"own_wrappers:Sized": sized},
        {"TransformReward": {"func": "own_wrappers:negated"}},
        {
            "TransformObservation": {
                "func": "own_wrappers:marked",
                "observation_space": "own_wrappers:MARKED",
            }
        },
    )
    with build_env(wrapped(*functions), seed=0) as env:
        assert rewards(env, 1)[0] == [-1.0]
        assert env.observation.tolist() == [[7.0] * 4]
    with pytest.raises(SettingError, match="own_wrappers has no nobody"):
        probe(wrapped({"TransformReward": {"func": "own_wrappers:nobody"}}))


@pytest.mark.parametrize("bounds", [([-1], [1]), ([-1.0], [1.0])])
def test_lists_become_arrays_where_a_wrapper_takes_those(bounds):
    """Gymnasium's own wrappers too: a bound for each element."""
    low, high = bounds
    rescaled = {"RescaleAction": {"min_action": low, "max_action": high}}
    spec = probe(wrapped(rescaled, env_id="Pendulum-v1"))
    assert (spec.action.low, spec.action.high) == ((-1,), (1,))
    with build_env(wrapped({"own_wrappers:Offset": {"by": [0.5, 1.5]}}), seed=0) as env:
        assert rewards(env, 1)[0] == [3.0]


def test_functions_named_by_a_checkpoint_are_not_imported(tmp_path):
    wrappers = [{"TransformReward": {"func": "own_wrappers:negated"}}]
    saved = {"env": {"id": "CartPole-v1", "wrappers": wrappers}}
    with pytest.raises(CheckpointError, match="own_wrappers:negated imports a module"):
        validate_no_foreign_modules(tmp_path, saved, {"env": {"id": "CartPole-v1"}})


@pytest.mark.parametrize(
    "value",
    [
        "[{own_wrappers:Scaled: {factor: 3}}]",
        "[{own_wrappers:Scaled:{factor:3}}]",
        "[TimeLimit,{own_wrappers:Scaled : {factor: 3}}]",
        r"[{own_wrappers\:Scaled: {factor: 3}}]",
        "[{own_wrappers:Scaled: {}},own_wrappers:Scaled]",
        "[{own_wrappers:Scaled:null}]",
    ],
)
def test_a_colon_needs_no_backslash(value):
    [*_, written] = compose_one([f"env.wrappers={value}"]).env.wrappers
    name = written if isinstance(written, str) else next(iter(written))
    assert name == "own_wrappers:Scaled"


def test_modules_named_by_a_checkpoint_are_not_imported(tmp_path):
    wrappers = [CUT, {"own_wrappers:Scaled": {}}]
    saved = {"env": {"id": "CartPole-v1", "wrappers": wrappers}}
    with pytest.raises(CheckpointError, match="own_wrappers:Scaled imports a module"):
        validate_no_foreign_modules(
            tmp_path, saved, {"env": {"id": "CartPole-v1", "wrappers": [CUT]}}
        )
    validate_no_foreign_modules(
        tmp_path, saved, {"env": {"id": "X", "wrappers": ["own_wrappers:Scaled"]}}
    )


def test_a_run_and_its_policy_keep_their_wrappers(tmp_path, capsys):
    override = r"env.wrappers=[{TimeLimit:{max_episode_steps:7}},{own_wrappers\:Scaled:{factor:3}}]"
    run, summary, _ = warm.run(tmp_path, "total_steps=300", "eval.every=300", override)
    assert (summary["eval_return_mean"], summary["return_mean"]) == (21.0, 21.0)
    with pytest.raises(SystemExit) as refused:
        main([str(run)])
    assert refused.value.code == 3 and "imports a module" in capsys.readouterr().err
    again = "wrappers=[{TimeLimit: {max_episode_steps: 6}}, 'own_wrappers:Scaled']"
    main([str(run), "--json", "--env", again])
    assert json.loads(capsys.readouterr().out)["return_mean"] == 12.0
