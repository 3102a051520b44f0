"""`scripts/envs.py`: the list of presets, and one line for each fault of an environment."""

import json
import logging
import os
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from gymnasium import spaces

from steadyrl.core.errors import CommandError, SettingError
from steadyrl.envs.encoding.images import AS_DECLARED
from steadyrl.envs.factory import build_env, probe
from steadyrl.training.cli.checks import env_check, envs
from steadyrl.training.cli.checks import isolated as isolated_checks
from steadyrl.training.cli.checks.envs import findings, line_of, main, presets, settings_of
from steadyrl.training.cli.checks.isolated import ABSENT, FAULT, NOTE, OK, Finding, isolated
from steadyrl.training.cli.checks.outside import Observed, outside_of
from steadyrl.training.config.settings import CONFIGS
from steadyrl.training.logging.terminal import attached

PATIENT = 60.0


def settings(name, *overrides):
    return settings_of(f"checked_envs:{name}-v0", overrides, None)


def found_by(check, name, *overrides, seconds=PATIENT):
    """Return (level, text) of a check's findings."""
    return [f[::2] for f in isolated("here", check, settings(name, *overrides), seconds)]


def faults(check, name, **more):
    return faults_of(found_by(check, name, **more))


def faults_of(found):
    return [text for level, text in found if level == FAULT]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Play few steps."""
    monkeypatch.setattr(env_check, "STEPS", 60)
    monkeypatch.setattr(env_check, "TIMED", 0.0)


@pytest.mark.parametrize(
    "check", [env_check.gymnasium_checks, env_check.episodes, env_check.determinism]
)
@pytest.mark.parametrize("name", ["Fine", "Parts", "Film", "Reusing", "ReusingInfo", "Flags"])
def test_a_correct_environment_has_no_faults(check, name):
    found = found_by(check, name)
    assert {level for level, _ in found} <= {OK, NOTE}
    assert OK in {level for level, _ in found}


FAULTS = [
    ("Unseeded", env_check.determinism, "its observation differs at step 0"),
    ("Unseeded", env_check.gymnasium_checks, "is non-deterministic"),
    ("Carried", env_check.determinism, "an episode depends on the one before it"),
    (
        "Lost",
        env_check.episodes,
        "are outside of the observation space: 'zone' is 4, its space Dis",
    ),
    ("Bright", env_check.episodes, "are outside of the observation space: it "),
    ("Unrewarded", env_check.episodes, "step 6: its reward is None, a NoneType, not a number"),
    ("Boxed", env_check.episodes, "not a number: return reward.item()"),
    (
        "Tensored",
        env_check.episodes,
        "step 6: its reward is tensor([1.]), a Tensor, not a number: return reward.item()",
    ),
    ("Undefined", env_check.episodes, "step 6: its reward is nan"),
    ("Spoken", env_check.episodes, "step 1: terminated is 'False', a str, not a bool"),
    ("Raising", env_check.episodes, "KeyError: 'goal' ("),
    ("Crashing", env_check.episodes, "its process was killed by SIGSEGV"),
]


def test_warnings_are_findings_and_not_printed_too(caplog):
    checks = findings(settings("Unseeded"))
    next(checks)
    checks.close()
    assert caplog.records == []
    texts = [text for level, text in found_by(env_check.encoding, "Unseeded") if level == NOTE]
    assert any("gives another observation the second time" in text for text in texts)


def test_warnings_stay_silent_when_an_older_log_is_closed_meanwhile(caplog, monkeypatch):
    """As when a log that nobody closed is collected: it restores the logger's `propagate`."""
    older = attached(logging.NullHandler())
    older.__enter__()

    def closes(*of):
        older.__exit__(None, None, None)
        return probe(*of)

    monkeypatch.setattr("steadyrl.envs.factory.probe", closes)
    checks = findings(settings("Unseeded"))
    next(checks)
    checks.close()
    assert caplog.records == []


def test_nan_is_no_fault_of_determinism():
    """It differs from itself, and is found by another check."""
    assert faults(env_check.determinism, "Undefined") == []


@pytest.mark.parametrize(
    ("name", "check", "text"),
    FAULTS,
)
def test_each_fault_is_one_clear_line(name, check, text):
    [found] = faults(check, name)
    assert text in found


@pytest.mark.parametrize(
    ("name", "check", "text"),
    [
        ("Outside", env_check.episodes, "outside of the observation space: it has "),
        ("Restarted", env_check.episodes, "are outside of the observation space"),
        ("Doubles", env_check.episodes, "it is float64, its space float32"),
        ("Doubles", env_check.gymnasium_checks, "is not within the observation space"),
        ("Wide", env_check.episodes, "67 of 67 observations are outside of the observation space"),
        ("Numbered", env_check.episodes, "step 1: terminated is 0, a int, not a bool"),
    ],
)
def test_what_training_takes_is_noted_and_no_fault(name, check, text):
    found = found_by(check, name)
    assert not faults_of(found)
    assert [level for level, said in found if text in said] == [NOTE]


def test_a_space_that_training_refuses_is_named_by_the_check_of_encodings_alone():
    seen = Observed(spaces.Text(3), AS_DECLARED)
    for observation in ("ab", "abcd"):
        seen.look(observation)
    [(level, text)] = seen.findings()
    assert level == FAULT and text.startswith("1 of 2 observations are outside")


BOX = spaces.Box(np.float32([0, -np.inf]), np.float32([1, np.inf]))


@pytest.mark.parametrize(
    ("space", "observation", "reason"),
    [
        (BOX, np.float32([0.5, 9]), ""),
        (BOX, np.float32([1.5, 9]), "it has 1.5 at [0], its space 0.0 to 1.0"),
        (BOX, np.float64([0.5, 9]), "it is float64, its space float32"),
        (
            BOX,
            np.float64([1 + 2**-52, 9]),
            "it has 1.0000000000000002 at [0], its space 0.0 to 1.0",
        ),
        (BOX, np.float32([0.5, np.nan]), "it has nan at [1], its space -inf to inf"),
        (BOX, "text", "it is 'text', its space Box("),
        (BOX, np.float32([1]), "it is array([1.], dtype=float32), its space Box("),
        (
            spaces.Dict(a=BOX),
            {"a": np.float32([-2, 0])},
            "'a' has -2.0 at [0], its space 0.0 to 1.0",
        ),
        (
            spaces.Tuple([BOX, spaces.Discrete(2)]),
            (np.float32([0, 0]), 2),
            "1 is 2, its space Dis",
        ),
        (spaces.Dict(a=BOX), {}, "it is {}, its space Dict('a': Box("),
    ],
)
def test_the_first_value_outside_of_a_space_is_named(space, observation, reason):
    found = outside_of(space, observation)
    assert found.startswith(reason) and bool(found) is bool(reason)


def test_a_hanging_environment_is_ended():
    [found] = faults(env_check.episodes, "Hanging", seconds=2.0)
    assert re.fullmatch(r"no answer within 2 s \(.*checked_envs\.py:\d+\)", found)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("check", [env_check.gymnasium_checks, env_check.episodes])
def test_programs_of_an_environment_end_with_its_check(check, tmp_path):
    found_by(check, "Serving", f"env.kwargs.file={tmp_path / 'pids'}")
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert pids and not any(map(is_running, pids))


def test_programs_of_workers_end_with_a_check_that_is_killed(tmp_path):
    def killed(settings):
        with build_env(settings, seed=0):
            os.kill(os.getpid(), signal.SIGKILL)
        yield

    file = tmp_path / "pids"
    several = ("env.backend=async", "env.num_envs=2", f"env.kwargs.file={file}")
    chosen = settings("Serving", *several)
    [(_, _, text)] = isolated("a check", killed, chosen, 60.0)
    assert text == "its process was killed by SIGKILL"
    pids = [int(line) for line in file.read_text().split()]
    assert len(pids) >= 4 and not any(map(is_running, pids))


def test_the_steps_that_were_compared_are_shown():
    texts = [text for _, text in found_by(env_check.determinism, "Fine")]
    assert "the same seed and actions give the same episode (9 steps compared)" in texts


def test_after_a_hang_the_other_checks_are_left_out(monkeypatch):
    def one_that_hangs(name, *_):
        return [Finding(FAULT, name, "no answer within 2 s")]

    monkeypatch.setattr(isolated_checks, "isolated", one_that_hangs)
    found = [(each.check, each.level) for each in findings(settings("Fine"))]
    assert found == [("gymnasium", FAULT), ("checks", NOTE)]


def test_a_wrapper_that_gymnasium_cannot_recreate_is_no_fault():
    wrapped = "env.wrappers=[checked_envs:Doubled]"
    found = found_by(env_check.gymnasium_checks, "Fine", wrapped)
    assert [level for level, _ in found] == [NOTE] and "a wrapper of yours" in found[0][1]
    assert not faults_of(found_by(env_check.episodes, "Fine", wrapped))


def test_a_key_before_the_id_is_understood():
    typed = settings_of("env.id=checked_envs:Fine-v0", (), None)
    assert typed == settings("Fine")
    assert settings_of("env=frozenlake", (), None) == settings_of("frozenlake", (), None)


def test_an_episode_without_end_is_noted():
    [(level, text)] = found_by(env_check.episodes, "Endless")
    assert level == NOTE and "no episode ended within 60 random steps" in text


def test_a_slow_environment_is_not_advised_to_have_a_time_limit(monkeypatch):
    monkeypatch.setattr(env_check, "SECONDS", 0.0)
    [(level, text)] = found_by(env_check.episodes, "Endless")
    assert level == NOTE and "within 1 random step, as many as it makes in 0 s" in text
    assert "max_episode_steps" not in text


@pytest.mark.parametrize("check", [env_check.episodes, env_check.determinism])
def test_a_first_step_that_compiles_is_not_counted_to_the_time(check, monkeypatch):
    clock = [0.0]

    class Compiling(env_check.Played):
        def step(self, action):
            clock[0] += 1.0 if clock[0] else 99.0
            return super().step(action)

    monkeypatch.setattr(env_check, "Played", Compiling)
    monkeypatch.setattr(env_check, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    texts = [text for _, text in check(settings("Endless"))]
    assert any(re.search(r"\b6 (random )?steps", text) for text in texts)


def test_the_return_of_random_actions_is_shown():
    [(_, text)] = found_by(env_check.episodes, "Fine")
    assert text == "6 random episodes of 9 steps, 54 in all, return 9 (from 9 to 9)"


@pytest.mark.parametrize(
    ("name", "overrides", "text"),
    [
        ("Parts", (), "7 numbers, float32: place 3, zone 4; 28 bytes"),
        ("Film", (), "Box(12, 16, 3) of uint8, read as an image of 3 channels of 12x16, bytes"),
        ("Film", ("env.image_axes=chw",), "an image of 12 channels of 16x3, bytes; 576 bytes"),
        ("Film", ("env.image_axes=vector",), "read as 576 numbers, float32; 2,304 bytes"),
        ("Fine", ("env.frame_stack=4",), "3 numbers, float32, 4 frames stacked; 12 bytes"),
    ],
)
def test_encodings_are_described(name, overrides, text):
    found = [line for _, line in found_by(env_check.encoding, name, *overrides)]
    assert [line for line in found if text in line], found
    assert "Discrete actions (n 2)" in found


@pytest.mark.parametrize("source", ["observation", "method", "info"])
@pytest.mark.parametrize("kind", ["vector", "image"])
def test_masks_are_respected(source, kind):
    """A forbidden action fails an assertion of this environment."""
    name = "masked_envs:StampedMasks-v0"
    made = settings_of(
        name, [f"env.kwargs.source={source}", f"env.kwargs.kind={kind}", "env.num_envs=2"], None
    )
    for check in (env_check.episodes, env_check.determinism, env_check.speed):
        found = isolated("here", check, replace(made, backend="sync"), PATIENT)
        assert {each.level for each in found} <= {OK, NOTE}, found


@pytest.mark.parametrize("backend", ["sync", "async", "kernel", "ale"])
def test_backends_are_measured_or_named_as_impossible(backend):
    made = replace(settings("Fine"), backend=backend, num_envs=2)
    [(level, text)] = [f[::2] for f in isolated("here", env_check.speed, made, PATIENT)]
    if backend in ("sync", "async"):
        assert level == OK and re.fullmatch(r"[\d,]+ steps/s", text)
    else:
        assert level == ABSENT and text


def test_a_wrong_name_is_refused(capsys):
    with pytest.raises(SystemExit) as left:
        main(["check", "CartPole-v9"])
    assert left.value.code == 2
    assert "did you mean" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["check", "checked_envs:Fyne-v0"])
    assert left.value.code == 2
    assert "did you mean checked_envs:Fine-v0?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [(["agent=ppo"], "only keys of the environment"), (["env.num_env=2"], "did you mean")],
)
def test_wrong_overrides_are_refused(overrides, reason):
    with pytest.raises(CommandError, match=reason):
        settings_of("cartpole", overrides, None)


def test_a_fault_exits_with_4_and_json_has_the_same_findings(capsys, monkeypatch):
    listed = [Finding(OK, "episodes", "fine"), Finding(FAULT, "determinism", "not fine")]
    monkeypatch.setattr(envs, "findings", lambda settings: iter(listed))
    with pytest.raises(SystemExit) as left:
        main(["check", "cartpole", "--json"])
    shown = capsys.readouterr()
    assert left.value.code == 4
    assert json.loads(shown.out) == {
        "id": "CartPole-v1",
        "findings": [each._asdict() for each in listed],
    }
    assert "CartPole-v1: a fault found" in shown.err
    with pytest.raises(SystemExit):
        main(["check", "cartpole"])
    assert "fault determinism  not fine" in capsys.readouterr().out


def test_a_check_goes_through_all_checks_and_backends(monkeypatch):
    monkeypatch.setattr(env_check, "SECONDS", 0.1)
    found = list(findings(settings("Fine")))
    checks = ["gymnasium", "episodes", "determinism", "encoding", "backend"]
    backends = ["kernel", "sync", "async", "batch", "ale", "envpool"]
    assert list(dict.fromkeys(each.check for each in found)) == checks + backends
    assert FAULT not in {each.level for each in found}
    assert all(len(line) <= 80 for each in found for line in line_of(each).splitlines())


def test_every_preset_is_listed_with_its_extra(capsys):
    listed = {each.name: each for each in presets(CONFIGS)}
    assert set(listed) == {path.stem for path in (CONFIGS / "env").glob("*.yaml")}
    assert listed["cartpole"].extra == "" and listed["cartpole"].ready
    assert listed["hopper"].extra == "mujoco"
    assert {each.extra for each in listed.values()} <= {"", *envs.MODULES}
    assert all(each.id for each in listed.values())
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if "pip install" not in line)
    assert [line.split()[0] for line in lines[: len(listed)]] == sorted(listed)


def test_a_missing_extra_is_said_with_its_command(capsys, monkeypatch):
    find = envs.find_module
    monkeypatch.setattr(envs, "find_module", lambda name: None if name == "mujoco" else find(name))
    main([])
    shown = capsys.readouterr().out
    assert re.search(r"^hopper +mujoco: no ", shown, re.M)
    assert 'mujoco is missing: pip install -e ".[mujoco]"' in shown


@pytest.mark.parametrize("name", ["plain", "pre (1)", "a,b", "it's"])
def test_presets_of_another_folder_are_listed_and_checked(tmp_path, capsys, name):
    tmp_path = tmp_path / name
    tmp_path.mkdir()
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine.yaml").write_text(
        "# My own.\nid: checked_envs:Fine-v0\nnum_envs: 3\n"
    )
    main(["--config-dir", str(tmp_path), "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert [each for each in listed if each["name"] == "mine"] == [
        {"name": "mine", "id": "checked_envs:Fine-v0", "extra": "", "about": "My own.",
         "ready": True}
    ]  # fmt: skip
    with pytest.raises(SystemExit):  # `check` knows the options before its name
        main(["--config-dir", str(tmp_path), "--json", "check", "mine", "env.num_envs=0"])
    assert "env.num_envs=0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--config-dir", str(tmp_path / "none")])
    assert "no such directory" in capsys.readouterr().err
    assert settings_of("mine", ["env.frame_stack=2"], tmp_path).num_envs == 3
    with pytest.raises(SettingError):
        settings_of("mine", ["env.num_envs=0"], tmp_path)


def test_random_actions_are_within_the_space():
    generator = np.random.default_rng(0)
    for name in ("pendulum", "cartpole"):
        made = replace(settings_of(name, ["env.num_envs=4"], None), backend="sync")
        with build_env(made, seed=0) as env:
            env.reset()
            actions = env_check.random_actions(generator, env.observation, env.spec)
            assert len(actions) == 4
            env.step(actions)


def test_random_actions_are_finite_and_between_bounds_that_may_be_infinite():
    inf = np.inf
    low, high = env_check.finite_bounds(
        np.array([100, -inf, -inf, -3, -0.5]), np.array([inf, -5, inf, 2, inf])
    )
    np.testing.assert_array_equal(low, [100, -6, -1, -3, -0.5])
    np.testing.assert_array_equal(high, [101, -5, 1, 2, 0.5])


def test_what_an_environment_prints_is_not_in_the_report(tmp_path, monkeypatch, capfd):
    module = tmp_path / "loud_env.py"
    module.write_text(
        "import os\n"
        "import gymnasium as gym\n"
        "from checked_envs import Fine\n"
        "print('imported')\n"
        "class Loud(Fine):\n"
        "    def __init__(self):\n"
        "        os.write(1, b'made by native code\\n')\n"
        "    def step(self, action):\n"
        "        print('stepping')\n"
        "        return super().step(action)\n"
        "gym.register('Loud-v0', Loud)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(env_check, "SECONDS", 0.1)
    main(["check", "loud_env:Loud-v0", "--json"])
    assert json.loads(capfd.readouterr().out)["id"] == "loud_env:Loud-v0"
