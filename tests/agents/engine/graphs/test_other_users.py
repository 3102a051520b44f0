"""Libraries that another user plants where torch's compiler works are never loaded."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from command import ROOT

VICTIM, ATTACKER = "steadyrl-test-v", "steadyrl-test-a"
COMPILE = """
import sys
import torch
from steadyrl.agents.engine.graphs.graph_cache import host_code
from steadyrl.agents.engine.graphs.trace import trace
from torch._inductor import aot_compile

graph, _ = trace(lambda x: (x * 3 + 1,), (torch.ones(3),))
if sys.argv[1] == "ours":
    print(host_code(graph, [torch.ones(3)])([torch.ones(3)])[0].tolist())
else:
    for node in graph.graph.nodes:
        node.meta.clear()
    aot_compile(graph, (torch.ones(3),))
"""
PLANT = """
#include <fcntl.h>
__attribute__((constructor)) static void planted(void) { open("%s", O_CREAT | O_WRONLY, 0666); }
"""


def run(user, shared_tmp, *command, check=True, **environment):
    """Run a command as this user, with a shared temporary directory."""
    found = pwd.getpwnam(user)
    torch_dir = {"PATH": os.environ["PATH"], "HOME": found.pw_dir, "USER": user, "LOGNAME": user}
    torch_dir |= {"TMPDIR": str(shared_tmp), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, user=found.pw_uid, group=found.pw_gid, extra_groups=[], cwd=shared_tmp,
        env=torch_dir | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def shared_tmp():
    """Create two users and a shared temporary directory; remove them afterwards."""
    if os.geteuid() != 0 or shutil.which("useradd") is None or shutil.which("gcc") is None:
        pytest.skip("two users are made by root with useradd, and one plants what gcc makes")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    try:
        for user in (VICTIM, ATTACKER):
            subprocess.run(["useradd", "--create-home", user], check=True)
        try:
            able = run(VICTIM, folder, sys.executable, "-c", "import torch", check=False)
        except PermissionError:
            able = None
        if able is None or able.returncode != 0:
            pytest.skip("this Python or its packages lie where other users cannot read")
        yield folder
    finally:
        for user in (VICTIM, ATTACKER):
            subprocess.run(["userdel", "--remove", user], capture_output=True, check=False)
        shutil.rmtree(folder)


def plant(shared_tmp, marker):
    """Plant marked libraries where the compiler would load the victim's from."""
    source, library = shared_tmp / "planted.c", shared_tmp / "planted.so"
    run(ATTACKER, shared_tmp, "sh", "-c", f"cat > {source} <<'end'\n{PLANT % marker}\nend")
    run(ATTACKER, shared_tmp, "gcc", "-shared", "-fPIC", "-o", str(library), str(source))
    torch_dir = shared_tmp / f"torchinductor_{VICTIM}"
    compiler = [sys.executable, "-c", COMPILE, "torch's"]
    run(
        ATTACKER,
        shared_tmp,
        *compiler,
        USER=VICTIM,
        LOGNAME=VICTIM,
        TORCHINDUCTOR_CACHE_DIR=str(torch_dir),
    )
    assert list(torch_dir.rglob("*.so"))
    our_dir = shared_tmp / f"steadyrl-{pwd.getpwnam(VICTIM).pw_uid}"
    replace = (
        f"find {torch_dir} -name '*.so' -exec cp {library} {{}} \\; && cp -r {torch_dir} {our_dir}"
    )
    run(ATTACKER, shared_tmp, "sh", "-c", f"{replace} && chmod -R 777 {torch_dir} {our_dir}")


@pytest.mark.slow
def test_a_library_that_another_user_planted_does_not_run(shared_tmp):
    (shared_tmp / "marks").mkdir()
    (shared_tmp / "marks").chmod(0o777)
    marker = shared_tmp / "marks" / "planted"
    plant(shared_tmp, marker)
    marker.unlink(missing_ok=True)
    done = run(VICTIM, shared_tmp, sys.executable, "-c", COMPILE, "ours")
    assert done.stdout.splitlines()[-1] == "[4.0, 4.0, 4.0]"
    assert not marker.exists()
    (cached,) = Path(pwd.getpwnam(VICTIM).pw_dir, ".cache", "steadyrl").glob("*.so")
    assert cached.stat().st_mode & 0o022 == 0
    # torch alone loads the planted library; otherwise this test would prove nothing.
    run(VICTIM, shared_tmp, sys.executable, "-c", COMPILE, "torch's", check=False)
    assert marker.exists()
