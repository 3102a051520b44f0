"""CI runs README's commands verbatim, and fails when one fails."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

CI = Path(__file__).parent.parent / ".ci"
PATH = "/usr/local/bin:/usr/bin:/bin"  # without the tools that create users

pytestmark = pytest.mark.skipif(
    any(shutil.which(each, path=PATH) is None for each in ("git", "python3")),
    reason="needs git and the system's python3",
)


def git(folder, *arguments):
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def run_ci(tmp_path):
    """Return a function that runs a program of .ci in a project with these README blocks."""

    def run_ci(blocks, program, *arguments):
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

    return run_ci


def test_readme_commands_run_in_a_clone_with_a_space_in_its_path(run_ci):
    done = run_ci(["pwd", "test -f README.md && echo two"], "newcomer", "readme:1", "readme:2")
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    (clone_path,) = [
        line for line in printed if line.endswith("/some folder/clone") and line[0] == "/"
    ]
    assert "two" in printed
    assert not Path(clone_path).exists()  # removed afterwards


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (["echo one; exit 3", "echo two"], ["one"]),
        (["echo one", "echo two; exit 3"], ["one", "two"]),
        (["echo one\nfalse\necho two", "echo three"], ["one"]),
    ],
)
def test_ci_stops_at_a_failing_readme_command(run_ci, blocks, expected):
    done = run_ci(blocks, "run")
    assert done.returncode in (1, 3)
    printed = done.stdout.splitlines()
    # Commands are echoed before they run, on the line of "==" or below.
    ran = [line for line in printed if line in ("one", "two", "three")]
    assert ran == expected


def test_ci_fails_when_a_readme_block_is_missing(run_ci):
    assert run_ci(["echo one"], "newcomer", "readme:2").returncode != 0


def test_a_release_stage_without_work_fails(run_ci):
    done = run_ci(["echo one"], "full", "--only", "pythons")  # no Python versions are configured
    assert done.returncode != 0 and "ended well" not in done.stdout


def test_ci_alone_keeps_to_a_cpu_build_of_torch(run_ci):
    (asked,) = [
        line
        for line in tomllib.loads((CI.parent / "pyproject.toml").read_text())["project"][
            "dependencies"
        ]
        if line.startswith("torch")
    ]
    assert "<" not in asked and "==" not in asked
    done = run_ci(['cat "$PIP_CONSTRAINT"'], "newcomer", "readme:1")
    assert "torch<2.14" in done.stdout.splitlines()
