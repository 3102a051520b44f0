"""Checkpoints with valid hashes and invalid contents are rejected or harmless."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from opened import job
from safetensors.torch import load_file, save_file

from steadyrl.core.errors import NonFiniteError
from steadyrl.loop import train
from steadyrl.training.checkpoints.manifest import CheckpointError, entry_of, saved_below, self_hash
from steadyrl.training.checkpoints.saver import Saver
from steadyrl.training.policies.policy import run_metadata
from steadyrl.training.setup import build
from tests.training.run.test_run_state import Lines, opened

DQN = ("total_steps=300", "eval.every=0", "agent.replay.prioritized=true", "env.num_envs=2",
       "agent.replay.capacity=200", "checkpoint.keep=1")  # fmt: skip
PPO = ("agent=ppo", "env=cartpole", "agent.rollout_steps=64", "agent.minibatches=2", "device=cpu",
       "agent.normalize_obs=true", "agent.compile=false", "agent.hidden=[8]", "total_steps=300",
       "env.num_envs=2", "eval.every=0", "checkpoint.keep=1")  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 10**30, 1e308, "x" * 1000, [], [[]], {}, {"$number": "nan"},
    {"$tensor": "none"}, "${oc.env:HOME}", "os.system", -(2**63),
]  # fmt: skip


def flatten(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list) and item and "$tensor" not in item:
            yield from flatten(item, (*path, key))
        else:
            yield (*path, key)


def set_key(value: Any, path: tuple[Any, ...], item: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = item


def update_hash(path: Path, name: str) -> None:
    """Update the hash of a changed file, as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = entry_of((path / name).read_bytes())
    manifest["sha256"] = self_hash(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@contextmanager
def resumable(folder: Path, chosen: tuple[str, ...], quick: bool) -> Iterator[tuple[Saver, Path]]:
    """Yield a saver that can resume a finished run, and the path of its checkpoint."""
    log = logging.getLogger("steadyrl")
    before, log.propagate = log.propagate, False
    try:
        train(job(folder, *chosen, quick=quick))
        resuming = job(folder, *chosen, "resume=auto", quick=quick)
        with build(resuming) as (env, agent):
            metadata = run_metadata(resuming.config, env.spec, agent)
            saver = Saver(resuming.settings.run.checkpoint, folder / "run", metadata)
            saver.attach(opened(resuming, agent, Lines()), env, agent)
            [saved] = saved_below(folder / "run" / "checkpoints")
            yield saver, saved.path
    finally:
        log.propagate = before


def outcome(saver: Saver) -> str:
    try:
        saver.resume()
    except CheckpointError as error:
        assert str(error).isprintable()
        return "refused"
    except NonFiniteError:
        return "refused"
    return "taken"


def outcomes_of_changed_documents(
    folder: Path, chosen: tuple[str, ...], quick: bool, count: int
) -> list[str]:
    generator, outcomes = random.Random(0), []
    with resumable(folder, chosen, quick) as (saver, path):
        assert outcome(saver) == "taken"
        original = folder / "whole"
        shutil.copytree(path, original)
        found = [
            (name, each)
            for name in ("run.json", "env.json", "agent.json", "replay.json")
            if (path / name).exists()
            for each in flatten(json.loads((path / name).read_text()))
        ]
        for name, each in generator.sample(found, min(count, len(found))):
            document = json.loads((path / name).read_text())
            set_key(document, each, generator.choice(VALUES))
            (path / name).write_text(json.dumps(document))
            update_hash(path, name)
            outcomes.append(outcome(saver))
            shutil.rmtree(path)
            shutil.copytree(original, path)
        assert outcome(saver) == "taken"
    return outcomes


@pytest.mark.parametrize(("chosen", "quick"), [(DQN, True), (PPO, False)], ids=["dqn", "ppo"])
def test_random_values_in_a_checkpoint_are_rejected_or_harmless(
    tmp_path: Path, chosen: tuple[str, ...], quick: bool
) -> None:
    outcomes = outcomes_of_changed_documents(tmp_path, chosen, quick, 60)
    assert set(outcomes) == {"refused", "taken"}


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "quick"), [(DQN, True), (PPO, False)], ids=["dqn", "ppo"])
def test_every_changed_value_in_a_checkpoint_is_rejected_or_harmless(
    tmp_path: Path, chosen: tuple[str, ...], quick: bool
) -> None:
    assert outcomes_of_changed_documents(tmp_path, chosen, quick, 10_000)


def test_replay_cursors_out_of_range_are_rejected(tmp_path: Path) -> None:
    with resumable(tmp_path, DQN, quick=True) as (saver, path):
        tensors = load_file(path / "replay.safetensors")
        for name in [key for key in tensors if key.startswith("timeline.")]:
            if name.endswith("flags"):
                continue
            for value in (-1, 10**9):
                changed_tensors = dict(tensors)
                changed_tensors[name] = torch.full_like(tensors[name], value)
                save_file(changed_tensors, path / "replay.safetensors")
                update_hash(path, "replay.safetensors")
                assert outcome(saver) == "refused", name


def test_a_checkpoint_of_another_agent_is_rejected_with_differences(tmp_path: Path) -> None:
    with resumable(tmp_path, DQN, quick=True) as (saver, path):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["metadata"] |= {"agent": "ppo", "weights": {"w": [1]}}
        manifest["sha256"] = self_hash(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="agent is ppo there and dqn here; weights is"):
            saver.resume()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"total_steps": "${oc.env:HOME}"}, "no value but a reference"),
        ({"env": {"id": "os:system"}}, "imports a module"),
        ({"agent": {"name": "os.system"}}, "cannot be used"),
        ({"seed": -1}, "cannot be used"),
        ({"unheard_of": 1}, "cannot be used"),
        ({"env": "CartPole-v1"}, "cannot be used"),
        ({"checkpoint": None}, "cannot be used"),
        ({"checkpoint": 5}, "cannot be used"),
        ({"agent": {"name": ["dqn"]}}, "cannot be used"),
    ],
    ids=str,
)
def test_an_invalid_configuration_in_a_checkpoint_is_rejected(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    train(job(tmp_path, *DQN, "total_steps=50"))
    [saved] = saved_below(tmp_path / "run" / "checkpoints")
    manifest = json.loads((saved.path / "manifest.json").read_text())
    config = manifest["metadata"]["config"]
    for key, value in changed.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    manifest["sha256"] = self_hash(manifest)
    (saved.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=reason):
        job(tmp_path, f"resume={tmp_path / 'run'}", quick=False)
