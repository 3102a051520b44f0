"""Every command in the documentation is run here as far as is cheap, or has a reason not to be.

By default the README's training commands are composed and validated, up to the training
itself, and programs parse their arguments. `-m slow` covers the commands of all pages, trains,
and runs the programs on the results.
"""

import importlib.util
import math
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from algorithms import NAMES, known, small
from documented import ROOT, commands, read, shown
from opened import job
from written_runs import write_run

from steadyrl.envs.encoding.spaces import observation_encoder
from steadyrl.envs.rendering.video import video_encoder_missing
from steadyrl.envs.settings import ImageSettings
from steadyrl.loop import train
from steadyrl.training.cli.main import main
from steadyrl.training.cli.programs import PROGRAMS

# {pattern of commands that are not run here: reason}.
NOT_RUN = {
    r"python3 -m venv|(\.|source) .*activate|(.*/)?pip install": "tests/test_installed.py does",
    r"\.venv/bin/python": "the same is shown without the directory",
    r"(python -m )?pytest|ruff|mypy": "these are the checks themselves",
    r"tensorboard": "a server; tests/training/logging/test_tensorboard.py reads what it shows",
    r"(python -m )?steadyrl (NAME|PROGRAM|evaluate|compare|plot)$": "names a program only",
    r"steadyrl train -m .*hydra/launcher": "tests/test_launchers.py sweeps with every launcher",
    r"steadyrl train --config-dir outputs/tuning": "tests/training/cli/test_tune.py takes the "
    "preset that a study wrote",
    r"steadyrl train resume=.*/checkpoints/": "tests/test_resume_checkpoint.py goes back to one",
    r"steadyrl train resume=last": "tests/test_resume_last.py finds the newest unfinished run",
    r"(srun )?torchrun": "tests/training/distributed/test_torchrun.py starts runs with it",
    r"eval |source ": "tests/training/cli/shell/test_completion.py completes in real shells",
    r"'(#!|#SBATCH|head=)|(export|set|grep)\b": "the shell's, around a command of ours",
    r".* checkpoint.mirror=s3://": "tests/training/mirror/test_s3.py copies to a server of its own",
    r".*--watch": "opens a window; tests/training/cli/test_evaluate.py tells what it needs",
    r"scripts/gpu_day.sh": "minutes; tests/scripts/test_gpu_day.py runs its reduced form",
    r"python docs/configuration.py": "writes a page; tests/docs/test_configuration.py compares it",
    r"python docs/tables.py": "writes pages; tests/docs/test_tables.py compares them",
    r"python docs/architecture.py": "draws a picture; tests/docs/test_architecture.py compares it",
}
# These take minutes to hours: only their arguments are parsed here, for {program: reason}.
LONG = {
    "benchmark.py": "tests/scripts/benchmarks run its parts",
    "soak.py": "tests/scripts/soaking runs a short one",
    "tune.py": "tests/training/cli/test_tune.py runs studies, that of the page is compared below",
    "population.py": "tests/training/cli/test_population.py likewise",
}
SHORT = ("device=cpu", "threads=1", "eval.every=0", "log.every=100")
READERS_MODULES = {
    "my_package/__init__.py": "",
    "my_package/envs.py": 'import gymnasium as gym\ngym.register("MyEnv-v0", '
    '"gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=9)\n',
    "my_package/wrappers.py": "import gymnasium as gym\nclass Mine(gym.Wrapper):\n"
    "    def __init__(self, env, strength):\n        super().__init__(env)\n",
    "my_package/rewards.py": "def halved(reward):\n    return reward / 2\n",
    "my_package/teachers.py": "class Expert:\n    def act(self, obs):\n"
    "        return (obs[:, 2] + obs[:, 3] > 0).astype(int)\n",
    # The environment and the wrapper of the page on one's own environment.
    "my_module.py": "\n".join(
        re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-environment.md").read_text(), re.S)
    )
    + 'gym.register("MyEnv-v0", Corridor, max_episode_steps=9)\n'
    + """
class Camera(gym.Env):
    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (12, 12, 3), np.uint8), state=spaces.Box(-2, 2, (2,))
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observed(), {}

    def step(self, action):
        return self.observed(), 0.0, False, False, {}

    def observed(self):
        image = self.np_random.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        return {"image": image, "state": self.np_random.uniform(-2, 2, 2).astype(np.float32)}

gym.register("Camera-v0", Camera, max_episode_steps=9)
""",
}


def shortening(text):
    """Return overrides that make a run short; a sweep over agents gets no agent's keys."""
    if "resume=" in text:  # of a run that was made short
        return ("total_steps=600",)
    agents = set(re.findall(rf"(?<=[=_,])(?:{'|'.join(NAMES)})(?![a-z0-9])", text)) or {NAMES[0]}
    if len(agents) > 1:  # one rollout of PPO at least
        return ("total_steps=2000",)
    name = agents.pop()
    # Keep the command's network, whose weights may have to fit another run's.
    few = [each for each in small(name).short if not each.startswith("agent.hidden")]
    if "init_from=" in text:  # the network of that run
        few.append("agent.hidden=[16]")
    # A rollout long enough for sequences and batches.
    if "recurrent" in text or (name == "ppo" and "batch_size" in text):
        few = [each for each in few if "rollout_steps" not in each and "minibatches" not in each]
        rollout = () if "rollout_steps" in text else ("agent.rollout_steps=256",)
        return ("total_steps=4500", "agent.compile=false", *rollout, *few)
    return ("total_steps=600", *known(name, "agent.compile=false"), *few)


def reason_not_to_run(command):
    found = [why for how, why in NOT_RUN.items() if re.match(how, command.text)]
    return found[0] if found else None


RUN_HERE = [command for command in commands() if reason_not_to_run(command) is None]


def arguments_of(command):
    """Return the program's name and the arguments of a command."""
    program, *rest = command.words
    if program == "python":
        return rest[0].rpartition("/")[2], rest[1:]
    if program != "steadyrl":
        return program, rest
    if rest[0] in PROGRAMS:
        return f"{rest[0]}.py", rest[1:]
    return "train.py", rest


TRAINING = [command for command in RUN_HERE if arguments_of(command)[0] == "train.py"]
ANALYSIS = [c for c in RUN_HERE if (ROOT / "scripts" / arguments_of(c)[0]).is_file()]
named = pytest.mark.parametrize


def continues(command):
    """Return whether a command takes up the run of the fixture `trained`."""
    return "resume=outputs/run" in command.text or "init_from=" in command.text


def with_slow_marks(commands):
    """Mark commands of other pages than the README, and sweeps, as slow."""
    for command in commands:
        quick = command.page == "README.md" and "-m" not in command.words
        quick = quick and not continues(command)  # a run has to be trained first
        marks = () if quick else pytest.mark.slow
        yield pytest.param(command, marks=marks, id=command.text)


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory):
    """Return a folder with metrics of some runs and a reader's own modules."""
    folder = tmp_path_factory.mktemp("documented")
    for name in ("before", "after", "false-1", "true-1", "false-3", "true-3", "uniform", "per"):
        for seed in (1, 2):
            series = {step: step / 50 + seed for step in (1_000, 2_000, 3_000)}
            write_run(folder / "runs" / f"{name}-{seed}", series, seed=seed)
    for path, text in READERS_MODULES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    few = ("total_steps=300", "eval.every=150", "eval.episodes=2", "agent.learning_starts=100")
    train(job(folder, *few))
    return folder / "run"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Return a folder with the teacher runs that pages refer to."""
    folder = tmp_path_factory.mktemp("taught")
    few = ("agent=ppo", "device=cpu", "agent.rollout_steps=16", "total_steps=64", "eval.every=0")
    for env, *names in (("lunarlander", "outputs/run", "teacher"),
                        ("cartpole", "small-teacher")):  # fmt: skip
        for name in names:
            train(job(folder, f"env={env}", *few, f"run_dir={folder / name}", quick=False))
    return folder


@pytest.fixture
def reader_folder(runs_folder, tmp_path, monkeypatch):
    """Change to a folder with runs and the reader's own modules."""
    shutil.copytree(runs_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "outside_algorithm"))
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] in ("my_package", "my_module")]:
        del sys.modules[name]


def test_the_first_episodes_of_the_vector_environment_are_as_long_as_the_next(reader_folder):
    import my_module

    env = my_module.PointMass(num_envs=3, max_episode_steps=5)
    env.reset(seed=0)
    still = np.zeros((3, 2), np.float32)
    found = [env.step(still)[3].tolist() for _ in range(11)]
    over = [step for step, truncated in enumerate(found) if all(truncated)]
    assert over == [4, 10]  # the step between resets


@pytest.mark.filterwarnings("ignore:.*Overriding environment")  # each test imports the module anew
def test_the_wrapper_of_an_image_and_numbers_keeps_both(reader_folder):
    import my_module

    plain = my_module.Camera()
    painted = my_module.Painted(plain, low=-2, high=2)
    seen, (both, _) = plain.reset(seed=0)[0], painted.reset(seed=0)
    assert both in painted.observation_space
    np.testing.assert_array_equal(both[..., :3], seen["image"])
    numbers = both[..., 3:] / 255 * 4 - 2
    np.testing.assert_allclose(numbers, np.full((12, 12, 2), seen["state"]), atol=4 / 255)
    assert painted.observation({**seen, "state": np.float32([-9, 9])})[0, 0, 3:].tolist() == [
        0,
        255,
    ]
    encoder = observation_encoder(painted.observation_space)
    assert (encoder.shape, encoder.dtype) == ((5, 12, 12), "uint8")
    pixels = observation_encoder(plain.observation_space, ImageSettings(axes="vector"))
    assert (pixels.shape, pixels.dtype) == ((12 * 12 * 3 + 2,), "float32")


def test_documentation_shows_commands_of_all_programs():
    programs = {arguments_of(command)[0] for command in RUN_HERE}
    assert programs >= {"train.py", *LONG, *(f"{name}.py" for name in PROGRAMS)}
    assert len(TRAINING) > 20
    pages = {command.page for command in RUN_HERE}
    assert pages >= {
        "README.md",
        "CONTRIBUTING.md",
        "environments.md",
        "evaluating.md",
        "networks.md",
    }


def test_every_command_is_run_or_has_a_reason():
    unknown = [command for command in RUN_HERE if command not in [*TRAINING, *ANALYSIS]]
    assert unknown == [], "run it here, or add a reason to NOT_RUN"


def test_every_reason_not_to_run_is_used():
    texts = [command.text for command in commands()]
    assert [how for how in NOT_RUN if not any(re.match(how, text) for text in texts)] == []


@named(
    ("line", "words"),
    [
        ("python train.py -m seed=0,1     # one each", ["python", "train.py", "-m", "seed=0,1"]),
        ("python train.py a='{b: c}'     the reader's own", ["python", "train.py", "a={b: c}"]),
        ("taskset -c 0 python x.py RUN/policy", ["python", "x.py", "outputs/run/policy"]),
        ("python train.py … run_dir=DIR", ["python", "train.py", "run_dir=outputs/another"]),
        ("for n in 1 2", []),
        (" do", []),
        ("  python train.py x=$n y=no$n", ["python", "train.py", "x=3", "y=no$n"]),
    ],
)
def test_command_lines_are_parsed_like_a_reader_does(line, words):
    assert list(read(shown(line))) == words


def call(monkeypatch, arguments, do):
    """Run the training command; return the accepted jobs."""
    accepted = []
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    try:
        main(lambda job: accepted.append(job) or do(job))
    except SystemExit as left:
        assert not left.code
    return accepted


def skip_without_extras(capsys, command, failed):
    errors = capsys.readouterr().err
    if "pip install" in errors:
        pytest.skip(errors.strip())
    pytest.fail(f"{command.page}: {command.text}: {errors or failed}")


@named("command", list(with_slow_marks(TRAINING)))
def test_training_commands_are_accepted(reader_folder, monkeypatch, capsys, command, request):
    _, arguments = arguments_of(command)
    if continues(command):
        shutil.copytree(request.getfixturevalue("trained"), reader_folder / "outputs" / "run")
    if any(text.startswith("seeds=") for text in arguments):
        pytest.skip("whether all of them finished is looked at: trained below")
    finished = SimpleNamespace(exit_code=0, score=0.0)
    try:
        accepted = call(monkeypatch, arguments, lambda job: finished)
    except AssertionError as failed:
        skip_without_extras(capsys, command, failed)
    only_prints = {"--help", "--cfg"} & set(arguments)
    assert bool(accepted) is not bool(only_prints)
    assert capsys.readouterr().out if only_prints else True
    if "-m" in arguments:
        values = [text.partition("=")[2] for text in arguments if "=" in text]
        assert len(accepted) == math.prod(map(swept, values)) > 1


def swept(text):
    """Return how many values of one override a sweep runs: `range(8)`, or a list with commas."""
    many = re.fullmatch(r"range\((\d+)\)", text)
    return int(many[1]) if many else len(text.split(","))


@pytest.mark.slow
@named("command", TRAINING, ids=lambda command: command.text)
def test_training_commands_train(reader_folder, teachers, trained, monkeypatch, capsys, command):
    _, arguments = arguments_of(command)
    if continues(command):
        shutil.copytree(trained, reader_folder / "outputs" / "run")
    for run in () if continues(command) else teachers.iterdir():
        if f"run_dir={run.name}" not in arguments:
            shutil.copytree(run, reader_folder / run.name, dirs_exist_ok=True)
    if {"--help", "--cfg"} & set(arguments) or "agent.name=outside.a2c" in arguments:
        pytest.skip("prints only, or is trained by tests/test_outside_algorithm.py")
    short = () if "resume=" in command.text else SHORT
    try:
        jobs = call(monkeypatch, [*arguments, *short, *shortening(command.text)], train)
    except AssertionError as failed:
        skip_without_extras(capsys, command, failed)
    assert all((job.directory / "policy").is_dir() for job in jobs)


def program(name):
    """Import a program, as `steadyrl` does."""
    if name.removesuffix(".py") in PROGRAMS:
        module = PROGRAMS[name.removesuffix(".py")].module
        return importlib.import_module(f"steadyrl.training.cli.{module}")
    place = ROOT / "scripts" / name
    spec = importlib.util.spec_from_file_location(f"documented_{place.stem}", place)
    module = importlib.util.module_from_spec(spec)
    monkeypatched = sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(monkeypatched)
    return monkeypatched


class ArgumentsParsed(BaseException):
    """Stop a program once its arguments are parsed; programs report any Exception as an error."""


def stop_after_parsing(monkeypatch):
    """Make programs stop once they have parsed their arguments."""
    from argparse import ArgumentParser

    parse = ArgumentParser.parse_args

    def reading(parser, arguments=None, namespace=None):
        parse(parser, arguments, namespace)
        raise ArgumentsParsed

    monkeypatch.setattr(ArgumentParser, "parse_args", reading)


@named("command", ANALYSIS, ids=lambda command: command.text)
def test_programs_parse_their_arguments(reader_folder, monkeypatch, capsys, command):
    name, arguments = arguments_of(command)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    stop_after_parsing(monkeypatch)
    try:
        program(name).main()
    except ArgumentsParsed:
        return
    except SystemExit as left:  # --help
        assert not left.code, capsys.readouterr().err
    assert "--help" in arguments
    assert "usage: " in capsys.readouterr().out


@pytest.mark.slow
@named(
    "command",
    [c for c in ANALYSIS if arguments_of(c)[0] not in LONG],
    ids=lambda command: command.text,
)
def test_programs_analyse_plot_and_film_runs(reader_folder, trained, monkeypatch, capsys, command):
    name, arguments = arguments_of(command)
    if "--video" in arguments and video_encoder_missing():
        pytest.skip("needs the extra video")
    shutil.copytree(trained, reader_folder / "outputs" / "run")
    for seed in (1, 2):  # as a sweep and seeds=[1,2] leave them
        for place in (f"outputs/sweeps/first/seed={seed}", f"runs/ppo/seed-{seed}"):
            series = {step: step / 50 for step in (1_000, 2_000)}
            write_run(reader_folder / place, series, seed=seed, rollout_return_mean=series)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    before = set(reader_folder.iterdir())
    try:
        program(name).main()
    except SystemExit as left:
        if left.code:
            skip_without_extras(capsys, command, left.code)
    made = {path for path in reader_folder.iterdir() if path.is_file()} - before
    if name == "plot.py" or "--video" in arguments:
        assert made and all(path.stat().st_size > 1_000 for path in made)
    else:
        assert capsys.readouterr().out


@pytest.mark.parametrize("name", ["study", "population"])
def test_examples_of_plans_are_those_of_the_package(name):
    page = (ROOT / "docs" / "many-runs.md").read_text()
    plans = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    assert yaml.safe_load((ROOT / "training" / "tuning" / f"{name}.yaml").read_text()) in plans
