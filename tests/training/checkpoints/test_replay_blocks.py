from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_factory import REPLAY_KINDS, make_replay
from synthetic_envs import EnvConfig, SyntheticEnvs, Timestep

import steadyrl.training.checkpoints.replay_blocks
from steadyrl.buffers.replay.buffer import ReplayBuffer
from steadyrl.core.files import Files
from steadyrl.core.state import Stateful
from steadyrl.training.checkpoints import archive
from steadyrl.training.checkpoints.archive import write_archive
from steadyrl.training.checkpoints.manifest import (
    CheckpointError,
    manifest_of,
    verified_metadata,
)
from steadyrl.training.checkpoints.replay_blocks import (
    ReplaySave,
    append_timesteps,
    load_replay,
    saved_timesteps,
)
from steadyrl.training.checkpoints.saver import Saver
from steadyrl.training.config.settings import CheckpointSettings


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steadyrl.training.checkpoints.replay_blocks, "BLOCK_BYTES", 300)


def feed(replay: ReplayBuffer, timesteps: list[Timestep]) -> None:
    for timestep in timesteps:
        replay.add(*timestep)


def learn(replay: ReplayBuffer, seed: int) -> list[torch.Tensor]:
    """Sample and update priorities for a while; return all samples."""
    random = np.random.default_rng(seed)
    sampled = []
    for _ in range(5):
        if not len(replay):
            break
        batch = replay.sample(8, beta=0.5)
        sampled += [part.clone() for part in batch]
        replay.update_priorities(batch.index, torch.from_numpy(random.random(8)))
    return sampled


def write(path: Path, replay: ReplayBuffer, before: Path | None) -> None:
    write_archive(Files(), path, ReplaySave(replay, before).parts(), {})


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(REPLAY_KINDS),
    envs=st.integers(1, 3),
    stack=st.integers(1, 3),
    n_step=st.integers(1, 4),
    capacity=st.integers(1, 60),
    prioritized=st.booleans(),
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_a_restored_replay_continues_the_same(
    tmp_path_factory: Any,
    kind: str,
    envs: int,
    stack: int,
    n_step: int,
    capacity: int,
    prioritized: bool,
    lengths: list[int],
    seed: int,
) -> None:
    scene = EnvConfig(num_envs=envs, frame_stack=stack, crash_rate=0.05)
    arguments = (kind, scene, capacity, n_step, 0.9, prioritized)
    replay, _ = make_replay(*arguments)
    envs_ = SyntheticEnvs(scene, seed)
    replay.start(envs_.first())
    directory, before = tmp_path_factory.mktemp("replay"), None
    for number, length in enumerate(lengths):
        feed(replay, list(envs_.timesteps(length)))
        learn(replay, number)
        path = directory / f"step-{number}"
        write(path, replay, before)
        before = path
    other, _ = make_replay(*arguments, seed=99)
    assert before is not None
    load_replay(other, before)
    assert len(other) == len(replay)
    for _ in range(3):
        assert all(map(torch.equal, learn(replay, 7), learn(other, 7)))
        timesteps = list(envs_.timesteps(20))
        feed(replay, timesteps)
        feed(other, timesteps)


def files(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in path.iterdir()}


def filled_replay() -> tuple[ReplayBuffer, SyntheticEnvs]:
    """Return a prioritised replay with 100 timesteps, and where they came from."""
    scene = EnvConfig(num_envs=2)
    replay, _ = make_replay("host", scene, 1000, 3, 0.9, True)
    envs_ = SyntheticEnvs(scene, 0)
    replay.start(envs_.first())
    feed(replay, list(envs_.timesteps(100)))
    return replay, envs_


def test_complete_blocks_are_written_once(tmp_path: Path) -> None:
    replay, envs_ = filled_replay()
    write(tmp_path / "one", replay, None)
    feed(replay, list(envs_.timesteps(100)))
    write(tmp_path / "two", replay, tmp_path / "one")
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    shared = {name for name in one if two.get(name) == one[name]}
    complete = {n for n in one if n.startswith("replay-0")}
    assert len(complete) > 10
    assert shared == complete


@pytest.mark.parametrize("lost", ["replay-000000000.safetensors", "manifest.json"])
def test_what_is_gone_from_the_last_checkpoint_is_written_again(tmp_path: Path, lost: str) -> None:
    """As after the purge of a scratch disk, which removes what was not read for days."""
    replay, _ = filled_replay()
    write(tmp_path / "one", replay, None)
    (tmp_path / "one" / lost).unlink()
    write(tmp_path / "two", replay, tmp_path / "one")
    write(tmp_path / "whole", replay, None)
    assert manifest_of(tmp_path / "two")["files"] == manifest_of(tmp_path / "whole")["files"]
    assert set(files(tmp_path / "two")) == set(files(tmp_path / "whole"))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1])]
)
def test_a_block_that_the_disk_has_damaged_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, damage: Any
) -> None:
    """Else every later checkpoint would be unusable."""
    monkeypatch.setattr(steadyrl.training.checkpoints.replay_blocks, "HASHED", 1.0)
    replay, envs_ = filled_replay()
    write(tmp_path / "one", replay, None)
    block = tmp_path / "one" / "replay-000000003.safetensors"
    block.write_bytes(damage(block.read_bytes()))
    feed(replay, list(envs_.timesteps(5)))
    write(tmp_path / "two", replay, tmp_path / "one")
    verified_metadata(tmp_path / "two")
    assert not (tmp_path / "two" / block.name).samefile(block)
    [line] = caplog.messages
    assert line.startswith(str(block)) and line.endswith("; it is written again")


def test_each_block_is_held_against_its_hash_within_some_saves(tmp_path: Path) -> None:
    replay, envs_ = filled_replay()
    before = tmp_path / "first"
    write(before, replay, None)
    block = before / "replay-000000003.safetensors"
    block.write_bytes(block.read_bytes()[:-1] + b"\xff")
    for save in range(100):
        feed(replay, list(envs_.timesteps(1)))
        path = tmp_path / str(save)
        write(path, replay, before)
        if not (path / block.name).samefile(block):
            break
        before = path
    verified_metadata(path)


def test_a_manifest_is_read_once_however_many_blocks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays, envs = (
        [make_replay("host", EnvConfig(), 200, 1, 0.9, False)[0] for _ in range(2)],
        SyntheticEnvs(EnvConfig(), 0),
    )
    replays[0].start(envs.first())
    feed(replays[0], envs.timesteps(90))
    read: list[Path] = []
    inner = manifest_of

    def counted(path: Path) -> Any:
        read.append(path)
        return inner(path)

    for module in (archive, steadyrl.training.checkpoints.replay_blocks):
        monkeypatch.setattr(module, "manifest_of", counted)
    write(tmp_path / "one", replays[0], None)
    write(tmp_path / "two", replays[0], tmp_path / "one")
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 5
    assert read == 2 * [tmp_path / "one"]  # to find out what can be linked, and to link it
    load_replay(replays[1], tmp_path / "two")
    assert read[2:] == [tmp_path / "two"] and replays[1].timestep == 90


def test_timesteps_are_not_overwritten_before_they_are_saved(tmp_path: Path) -> None:
    """The ring is overwritten many times while a slow disk writes it."""
    scene = EnvConfig(num_envs=2)
    arguments = ("host", scene, 200, 3, 0.9, True)
    replay, _ = make_replay(*arguments)
    envs_ = SyntheticEnvs(scene, 0)
    replay.start(envs_.first())
    feed(replay, list(envs_.timesteps(150)))
    reference, _ = make_replay(*arguments, seed=1)
    reference.load_state_dict(replay.state_dict())
    save = ReplaySave(replay, None)
    may_write = threading.Semaphore(0)

    def slowly() -> Iterator[tuple[str, Any]]:
        for part in save.parts():
            may_write.acquire()
            yield part

    writer = threading.Thread(
        target=write_archive, args=(Files(), tmp_path / "one", slowly(), {}), daemon=True
    )
    writer.start()
    waited = 0
    for timestep in envs_.timesteps(1000):
        waiting = threading.Thread(target=save.wait_for_overwrite, daemon=True)
        waiting.start()
        while waiting.is_alive():  # the loop waits: allow one more block
            may_write.release()
            waited += 1
            waiting.join(0.01)
        replay.add(*timestep)
    for _ in range(1000):
        may_write.release()
    writer.join()
    assert waited
    loaded, _ = make_replay(*arguments, seed=2)
    load_replay(loaded, tmp_path / "one")
    assert all(map(torch.equal, learn(reference, 3), learn(loaded, 3)))


def test_a_failed_write_does_not_block_the_loop(tmp_path: Path) -> None:
    scene = EnvConfig()
    replay, _ = make_replay("host", scene, 50, 1, 0.9, False)
    envs_ = SyntheticEnvs(scene, 0)
    replay.start(envs_.first())
    feed(replay, list(envs_.timesteps(200)))
    save = ReplaySave(replay, None)
    with pytest.raises(FileNotFoundError):
        write_archive(Files(), tmp_path / "missing" / "one", save.parts(), {})
    save.close()
    for timestep in envs_.timesteps(200):
        save.wait_for_overwrite()
        replay.add(*timestep)


class BlockingFiles(Files):
    """A disk that blocks until `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def make_directory(self, path: Path) -> None:
        self.answers.wait()
        super().make_directory(path)


def test_the_first_timestep_after_a_save_waits_for_the_writer(tmp_path: Path) -> None:
    scene, disk = EnvConfig(), BlockingFiles()
    replay, _ = make_replay("host", scene, 50, 1, 0.9, False)
    envs_ = SyntheticEnvs(scene, 0)
    replay.start(envs_.first())
    feed(replay, list(envs_.timesteps(200)))  # full: every timestep overwrites one
    saver = Saver(
        CheckpointSettings(every=1, seconds=0, keep=1, replay=True, mirror=None),
        tmp_path,
        {},
        files=disk,
    )
    agent = StubAgent(replay)
    saver.attach(agent, agent, agent)  # type: ignore[arg-type]
    saved_timestep = replay.timestep

    def run_loop() -> None:
        saver.after_step(1, None, best=False, requested=False)
        for timestep in envs_.timesteps(1):
            replay.add(*timestep)
        saver.after_step(1, None, best=False, requested=False)

    loop = threading.Thread(target=run_loop, daemon=True)
    loop.start()
    while saver._replay is None or not saver._replay._written._waiters:  # type: ignore[attr-defined]
        assert loop.is_alive(), "the loop did not wait"
    assert replay.timestep == saved_timestep, "a timestep was overwritten before it was saved"
    disk.answers.set()
    loop.join()
    saver.finish(1, None)


class FullDiskFiles(Files):
    """A disk without space for another directory."""

    def make_directory(self, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


class StubAgent(Stateful):
    """The part of an agent that a saver uses."""

    updates = 0
    state_names = ()

    def __init__(self, replay: ReplayBuffer) -> None:
        self.replay = replay

    def weights(self) -> dict[str, torch.Tensor]:
        return {}

    def before_checkpoint(self) -> None:
        """It is the run, too."""


def test_a_save_that_fails_at_once_does_not_block_the_loop(tmp_path: Path) -> None:
    scene = EnvConfig()
    replay, _ = make_replay("host", scene, 50, 1, 0.9, False)
    envs_ = SyntheticEnvs(scene, 0)
    replay.start(envs_.first())
    feed(replay, list(envs_.timesteps(200)))  # full: every timestep overwrites one
    saver = Saver(
        CheckpointSettings(every=1, seconds=0, keep=1, replay=True, mirror=None),
        tmp_path,
        {},
        files=FullDiskFiles(),
    )
    agent = StubAgent(replay)
    saver.attach(agent, agent, agent)  # type: ignore[arg-type]
    saver.save(200, None)

    def run_loop() -> None:
        for timestep in envs_.timesteps(60):
            saver.after_step(0, None, best=False, requested=False)
            replay.add(*timestep)

    loop = threading.Thread(target=run_loop, daemon=True)
    loop.start()
    loop.join(60)
    assert not loop.is_alive(), "the loop waits for a failed save"


def test_swapped_and_missing_blocks_are_rejected(tmp_path: Path) -> None:
    scene = EnvConfig()
    replay, _ = make_replay("host", scene, 100, 1, 0.9, False)
    envs_ = SyntheticEnvs(scene, 0)
    replay.start(envs_.first())
    feed(replay, list(envs_.timesteps(100)))
    parts = dict(ReplaySave(replay, None).parts())
    names = sorted(name for name in parts if name.startswith("replay-0"))
    swapped = {**parts, names[1]: parts[names[2]], names[2]: parts[names[1]]}
    write_archive(Files(), tmp_path / "swapped", swapped.items(), {})
    with pytest.raises(CheckpointError, match="holds timesteps"):
        load_replay(make_replay("host", scene, 100, 1, 0.9, False)[0], tmp_path / "swapped")
    missing = {name: part for name, part in parts.items() if name != names[1]}
    write_archive(Files(), tmp_path / "missing", missing.items(), {})
    with pytest.raises(CheckpointError, match="holds no"):
        load_replay(make_replay("host", scene, 100, 1, 0.9, False)[0], tmp_path / "missing")


def transitions(*replays: ReplayBuffer) -> set[tuple[float, ...]]:
    """Sample until every transition was sampled."""
    found = set()
    for replay in replays:
        for _ in range(40):
            obs, action, reward, discount, next_obs, *_ = replay.sample(64, beta=1.0)
            parts = (obs, action[:, None], reward[:, None], discount[:, None], next_obs)
            flat = torch.cat([part.double().flatten(1) for part in parts], 1)
            found |= {tuple(each) for each in flat.tolist()}
    return found


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("timesteps", [30, 90], ids=["not full", "overwritten"])
def test_a_replay_is_resharded_over_ranks(tmp_path: Path, timesteps: int, stack: int) -> None:
    scene = EnvConfig(num_envs=2, mean_length=6.0, frame_stack=stack)
    shape = {"n_step": 2, "gamma": 0.9, "prioritized": True}
    replay, _ = make_replay("host", scene, capacity=80, **shape)
    envs_ = SyntheticEnvs(scene, seed=1)
    replay.start(envs_.first())
    feed(replay, [envs_.step() for _ in range(timesteps)])
    path = tmp_path / "step-000000000001"
    write_archive(Files(), path, ReplaySave(replay, None, "rank0001-").parts(), {})

    full_copy, _ = make_replay("host", scene, capacity=100, **shape)
    append_timesteps(full_copy, saved_timesteps(path, "rank0001-", 0, 1))
    # Stacks at the start of a part may need frames before it.
    lost = transitions(replay) - transitions(full_copy)
    assert transitions(full_copy) <= transitions(replay)
    assert len(lost) <= (stack - 1) * scene.num_envs
    halves = [make_replay("host", scene, capacity=50, **shape)[0] for _ in range(2)]
    for part_index, half in enumerate(halves):
        append_timesteps(half, saved_timesteps(path, "rank0001-", part_index, 2))
    # Transitions across the two parts are in neither.
    missing = transitions(replay) - transitions(*halves)
    assert transitions(*halves) <= transitions(replay)
    assert len(missing) <= 2 * stack * scene.num_envs


def go_on(replay: ReplayBuffer, scene: EnvConfig, seed: int) -> set[tuple[float, ...]]:
    """Start in the middle of episodes and store steps; return their transitions of one step."""
    envs_, happened = SyntheticEnvs(scene, seed), set()
    envs_.first()
    for _ in range(4):
        envs_.step()
    replay.start(envs_.observation())
    for _ in range(20):
        obs = envs_.observation()
        step = envs_.step()
        replay.add(*step)
        for env in np.flatnonzero(step.valid):
            discount = 0.0 if step.terminated[env] else np.float32(0.9)
            numbers = [step.action[env], step.reward[env], discount]
            parts = (obs[env].ravel(), numbers, step.next_obs[env].ravel())
            happened.add(tuple(float(each) for part in parts for each in part))
    return happened


@pytest.mark.parametrize("stack", [1, 3])
def test_a_replay_that_was_resharded_is_resharded_again(tmp_path: Path, stack: int) -> None:
    """From two ranks to one, three and one; each goes on in the middle of episodes."""
    scene = EnvConfig(num_envs=2, mean_length=12.0, frame_stack=stack)

    def make(ranks: int) -> list[ReplayBuffer]:
        return [make_replay("host", scene, 800, 1, 0.9, True)[0] for _ in range(ranks)]

    replays = make(2)
    happened = go_on(replays[0], scene, 1) | go_on(replays[1], scene, 2)
    for change, ranks in enumerate((1, 3, 1)):
        path = tmp_path / f"step-{change:012d}"
        saves = (ReplaySave(old, None, f"{rank}-") for rank, old in enumerate(replays))
        write_archive(Files(), path, chain.from_iterable(save.parts() for save in saves), {})
        olds, replays = range(len(replays)), make(ranks)
        for rank, replay in enumerate(replays):
            for old in olds:
                append_timesteps(replay, saved_timesteps(path, f"{old}-", rank, ranks))
            happened |= go_on(replay, scene, 10 * change + rank + 3)
        there = transitions(*replays)
        assert there <= happened
        assert len(there) > 0.8 * len(happened)


def test_what_cannot_be_divided_among_other_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as hidden states, which a recurrent algorithm's replay stores as well."""
    scene = EnvConfig(num_envs=2)
    replay, _ = make_replay("host", scene, 50, n_step=1, gamma=0.9, prioritized=False)
    envs_ = SyntheticEnvs(scene, seed=1)
    replay.start(envs_.first())
    feed(replay, [envs_.step() for _ in range(20)])
    stored = replay._stored()
    hidden = {"hidden_state": torch.zeros(len(stored["reward"]), 2, 4)}
    monkeypatch.setattr(replay, "_stored", lambda: stored | hidden)
    path = tmp_path / "step-000000000001"
    write(path, replay, None)
    with pytest.raises(CheckpointError, match="its replay has hidden_state, which cannot be"):
        append_timesteps(replay, saved_timesteps(path, "", 0, 1))
