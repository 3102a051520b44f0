"""A real S3 server: runs are killed while they upload, and go on from the URL on an empty disk."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import QUICK
from warm import Process, finished

pytest.importorskip("s3fs")
pytest.importorskip("boto3")
pytest.importorskip("moto.server")

URL, MANIFEST = "s3://runs/cartpole", "/manifest.json"
KILLS = int(os.environ.get("STEADYRL_KILLS", "50"))
MOST_FILES = 30  # that are uploaded before a kill
RUN = (
    *QUICK, "threads=1", "total_steps=24000", "checkpoint.every=100", "eval.every=5000",
    "eval.episodes=1", "log.every=200", "report.at_end=false", "log.tensorboard=false",
    "run_dir=run",
)  # fmt: skip
SAME = ("weights_sha256", "steps", "updates", "episodes", "return_mean", "eval_return_mean")


class Killer:
    """Kills a process when the server receives its n-th file, which is stored or lost."""

    def __init__(self, put_object: Any) -> None:
        self._put_object = put_object
        self.left, self.stores = 0, True
        self.pid: int | None = None
        self.stored: list[str] = []

    def __call__(self, backend: Any, bucket: str, key: str, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        kills = self.left == 0 and self.pid is not None
        if kills:
            assert self.pid is not None
            os.kill(self.pid, signal.SIGKILL)
        if kills and not self.stores:
            raise ConnectionError("the sender was killed")
        self.stored.append(key)
        return self._put_object(backend, bucket, key, *args, **kwargs)


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Killer]:
    """Start the server with an empty bucket; yield what kills runs that upload to it."""
    import boto3  # type: ignore[import-untyped]
    from moto.s3.models import S3Backend
    from moto.server import ThreadedMotoServer

    killer = Killer(S3Backend.put_object)
    monkeypatch.setattr(S3Backend, "put_object", lambda *a, **k: killer(*a, **k))
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="runs")
    yield killer
    server.stop()


def start(folder: Path, *arguments: str) -> Process:
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return Process(folder, [*arguments], environment)


def commands(killer: Killer, life: int) -> tuple[str, ...]:
    """Return how a life begins: by `resume=URL` or, as long as nothing is there, `resume=auto`."""
    if life % 2 and any(key.endswith(MANIFEST) for key in killer.stored):
        return (f"resume={URL}", "run_dir=run")
    return (*RUN, f"checkpoint.mirror={URL}", "resume=auto")


@pytest.mark.slow
def test_runs_killed_while_uploading_end_like_an_undisturbed_one(
    killer: Killer, tmp_path: Path
) -> None:
    generator = random.Random(45)
    resumed = []
    for life in range(KILLS):
        killer.left, killer.stores = generator.randint(1, MOST_FILES), generator.random() < 0.5
        process = start(tmp_path / f"life-{life}", *commands(killer, life))
        killer.pid = process.pid
        out, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, out + err
        assert "Traceback" not in out + err
        resumed += [line for line in out.splitlines() if line.startswith("resumed from step")]
        print(life, killer.left, resumed[-1:], flush=True)
    killer.pid = None
    last = tmp_path / "last"
    process = start(last, f"resume={URL}", "run_dir=run")
    _, summary, out = finished(process, last, 0)
    whole = tmp_path / "whole"
    _, undisturbed, _ = finished(start(whole, *RUN), whole, 0)
    assert {key: summary[key] for key in SAME} == {key: undisturbed[key] for key in SAME}
    assert summary["mirror_complete"] is True, out
    assert len(set(resumed)) > KILLS // 5, "hardly any life got further than the one before"


@pytest.mark.slow
def test_a_server_that_never_answers_changes_only_the_time_of_the_end(tmp_path: Path) -> None:
    few = ("total_steps=600", "eval.every=0", "run_dir=run")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
        }
        process = Process(tmp_path, [*RUN, *few, f"checkpoint.mirror={URL}"], environment)
        _, summary, out = finished(process, tmp_path, 0)
    assert (summary["status"], summary["mirror_complete"]) == ("finished", False)
    assert "no answer within 20 s" in out
    assert "is not complete after 60 s" in out
