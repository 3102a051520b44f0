"""CI follows README's commands as they stand there, and fails where something does."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

CI = Path(__file__).parent.parent / ".ci"
PATH = "/usr/local/bin:/usr/bin:/bin"  # without what makes users: this test makes none

pytestmark = pytest.mark.skipif(
    any(shutil.which(each, path=PATH) is None for each in ("git", "python3")),
    reason="needs git and the system's python3",
)


def git(folder, *arguments):
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def follow(tmp_path):
    """Return what runs a program of .ci in a project whose README has these blocks."""

    def follow(blocks, program, *arguments):
        project, temporary = tmp_path / "project", tmp_path / "temporary"
        for each in (project, temporary):
            each.mkdir()
        shutil.copytree(CI, project / ".ci")
        text = "".join(f"Do:\n\n```bash\n{block}\n```\n\n" for block in blocks)
        (project / "README.md").write_text(text)
        git(project, "init", "-q")
        git(project, "add", ".")
        git(project, "commit", "-q", "-m", "A project")
        environment = {**os.environ, "PATH": PATH}
        command = ["bash", str(project / ".ci" / program), *arguments]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    return follow


def test_the_readmes_commands_are_run_in_a_clone_in_a_folder_with_a_space(follow):
    done = follow(["pwd", "test -f README.md && echo two"], "newcomer", "readme:1", "readme:2")
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    (where,) = [line for line in printed if line.endswith("/some folder/clone") and line[0] == "/"]
    assert "two" in printed
    assert not Path(where).exists()  # nothing is left


@pytest.mark.parametrize(
    ("blocks", "reached"),
    [
        (["echo one; exit 3", "echo two"], ["one"]),
        (["echo one", "echo two; exit 3"], ["one", "two"]),
        (["echo one\nfalse\necho two", "echo three"], ["one"]),
    ],
)
def test_ci_fails_where_a_command_of_the_readme_fails(follow, blocks, reached):
    done = follow(blocks, "run")
    assert done.returncode in (1, 3)
    printed = done.stdout.splitlines()
    # A command is printed before it is run, on one line with "==" or below it.
    ran = [line for line in printed if line in ("one", "two", "three")]
    assert ran == reached


def test_ci_fails_where_the_readme_has_lost_its_commands(follow):
    assert follow(["echo one"], "newcomer", "readme:2").returncode != 0


def test_before_a_release_a_stage_that_tries_nothing_has_failed(follow):
    done = follow(["echo one"], "full", "--only", "pythons")  # nothing says which are admitted
    assert done.returncode != 0 and "ended well" not in done.stdout


def test_ci_alone_keeps_to_a_cpu_build_of_torch(follow):
    (asked,) = [
        line
        for line in tomllib.loads((CI.parent / "pyproject.toml").read_text())["project"][
            "dependencies"
        ]
        if line.startswith("torch")
    ]
    assert "<" not in asked and "==" not in asked
    done = follow(['cat "$PIP_CONSTRAINT"'], "newcomer", "readme:1")
    assert "torch<2.14" in done.stdout.splitlines()
