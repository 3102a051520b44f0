"""`scripts/doctor.py` on machines where something is missing."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from command import ROOT, environment
from packaging.requirements import Requirement

from steadyrl.core.gates.numba_private import NUMBA
from steadyrl.core.gates.torch_private import TORCH
from steadyrl.training.cli.checks import requirements
from steadyrl.training.cli.checks.doctor import examine, main, report
from steadyrl.training.cli.checks.machine import YES, cpu_quota, no_compiler

SECTIONS = {
    *("steadyrl", "versions", "machine", "engines", "caches", "extras", "variables"),
    "problems",
}


@pytest.fixture
def plain(monkeypatch, tmp_path):
    """A machine with a compiler and caches of its own, whatever the tests run on."""
    for name in ("STEADYRL_ENGINE", "CXX", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wrong(part):
    return [line for line in examine()["problems"] if part in line]


def test_the_report_fits_a_terminal_and_json_has_the_same_facts(plain, capsys):
    process = [sys.executable, str(ROOT / "scripts" / "doctor.py")]
    done = subprocess.run(process, capture_output=True, text=True, check=True, env=environment())
    text = done.stdout
    main(["--json"])
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == SECTIONS
    lines = text.splitlines()
    assert len(lines) <= 40
    assert [line for line in lines if len(line) > 80 and " " in line.strip()[:60]] == []
    for name, version in facts["versions"].items():
        assert version in text and name in text
    assert facts["versions"]["torch"] != "missing"


def test_a_long_list_of_problems_is_listed_whole(plain):
    facts = examine() | {"problems": ["no compiler", "no memory"]}
    assert report(facts).splitlines()[-2:] == [
        "wrong      - no compiler",
        "           - no memory",
    ]


def test_a_missing_compiler_is_named(plain, monkeypatch):
    assert no_compiler() == "" and not wrong("compiler")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert wrong("no compiled updates: there is no C++ compiler no-such-compiler")


def test_a_cache_that_others_can_write_to_is_named(plain):
    place = plain / "cache" / "steadyrl"
    assert not wrong(str(place))
    place.chmod(0o777)
    assert wrong(f"cache of compiled updates: {place}: unusable")


def test_a_cache_without_permission_to_execute_is_named(plain, monkeypatch):
    status = os.statvfs(plain)
    fields = list(status)
    fields[8] = os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda place: os.statvfs_result(fields))
    assert wrong("mounted noexec")


def test_the_reference_engine_is_one_problem(plain, monkeypatch):
    monkeypatch.setenv("STEADYRL_ENGINE", "eager")
    found = examine()
    assert [line for line in found["problems"] if "STEADYRL_ENGINE=eager" in line]
    assert not [line for line in found["problems"] if "direct updates" in line]
    assert found["variables"]["STEADYRL_ENGINE"] == "eager"


@pytest.mark.parametrize(
    ("gate", "feature", "engine"),
    [
        (TORCH, "host_code", "compiled updates"),
        (TORCH, "run_backward", "direct updates"),
        (NUMBA, "products", "compiled policies"),
        (NUMBA, "call", "fused rollouts"),
        (NUMBA, "cache", "cached machine code"),
    ],
)
def test_an_engine_whose_private_names_are_missing_says_so(
    plain, monkeypatch, gate, feature, engine
):
    assert examine()["engines"][engine] == YES
    without = gate.features[feature]._replace(names=("torch.no_such_name",))
    monkeypatch.setitem(gate.features, feature, without)
    found = examine()
    assert "no_such_name" in found["engines"][engine]
    assert [line for line in found["problems"] if "no_such_name" in line]


def test_requirements_that_are_not_met_are_listed(plain, monkeypatch):
    wanted = [Requirement("numpy>=999"), Requirement("no-such-package"), Requirement("torch")]
    missing = requirements.missing(wanted)
    assert len(missing) == 2
    assert missing[0].startswith("numpy>=999 is required, ")
    assert missing[1] == "no-such-package is not installed"
    monkeypatch.setattr(requirements, "requirements", lambda: {"": wanted})
    assert wrong("no-such-package is not installed")


def test_extras_of_a_requirement_are_required_too(monkeypatch):
    versions = {"gymnasium": "1.3.0"}
    monkeypatch.setattr(requirements, "installed_version", versions.get)
    wanted = [Requirement("gymnasium[box2d]")]
    assert any("box2d" in text.lower() for text in requirements.missing(wanted))
    monkeypatch.setattr(requirements, "installed_version", lambda package: "99")
    assert not requirements.missing([Requirement("gymnasium[classic-control]")])


def test_an_installation_and_a_clone_have_the_same_requirements(tmp_path, monkeypatch):
    clone = {name: sorted(map(str, each)) for name, each in requirements.requirements().items()}
    lines = ["Metadata-Version: 2.1", "Name: steadyrl", "Version: 9"]
    for extra, texts in clone.items():
        lines += [f"Provides-Extra: {extra}"] if extra else []
        marker = f' ; extra == "{extra}"' if extra else ""
        lines += [f"Requires-Dist: {text}{marker}" for text in texts]
    folder = tmp_path / "steadyrl-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(requirements, "is_clone", lambda: False)
    found = requirements.requirements()
    assert {
        name: sorted(str(each).partition(";")[0].strip() for each in texts)
        for name, texts in found.items()
    } == clone


def test_the_time_that_a_cgroup_allows_is_read(tmp_path):
    mount, process = tmp_path / "mount", tmp_path / "proc" / "self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text("0::/jobs/one\n")
    assert cpu_quota(tmp_path / "proc") is None
    (process / "mountinfo").write_text(f"36 35 0:30 / {mount} rw - cgroup2 cgroup2 rw\n")
    (mount / "jobs" / "one").mkdir(parents=True)
    assert cpu_quota(tmp_path / "proc") is None
    (mount / "jobs" / "one" / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path / "proc") is None
    (mount / "jobs" / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path / "proc") == 1.5
    assert cpu_quota(tmp_path / "missing") is None


def test_a_full_disk_is_named(plain, monkeypatch):
    fields = list(os.statvfs(plain))
    fields[4] = 1  # blocks that are free for this user
    monkeypatch.setattr(os, "statvfs", lambda place: os.statvfs_result(fields))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(9, 8, 1))
    assert wrong("is almost full")


def test_help_needs_no_torch(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert not left.value.code
    assert "--json" in capsys.readouterr().out
