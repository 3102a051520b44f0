from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
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
from steadyrl.training.checkpoints.archive import write_archive
from steadyrl.training.checkpoints.manifest import CheckpointError
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


def feed(replay: ReplayBuffer, rows: list[Timestep]) -> None:
    for row in rows:
        replay.add(*row)


def learn(replay: ReplayBuffer, seed: int) -> list[torch.Tensor]:
    """Draw and set priorities for a while; return all that was drawn."""
    random = np.random.default_rng(seed)
    drawn = []
    for _ in range(5):
        if not len(replay):
            break
        batch = replay.sample(8, beta=0.5)
        drawn += [part.clone() for part in batch]
        replay.update_priorities(batch.index, torch.from_numpy(random.random(8)))
    return drawn


def write(path: Path, replay: ReplayBuffer, before: Path | None) -> None:
    write_archive(Files(), path, ReplaySave(replay, before).parts(), {})


@settings(max_examples=25, deadline=None)
@given(
    place=st.sampled_from(REPLAY_KINDS),
    envs=st.integers(1, 3),
    stack=st.integers(1, 3),
    n_step=st.integers(1, 4),
    capacity=st.integers(1, 60),
    prioritized=st.booleans(),
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_a_replay_continues_as_if_nothing_had_happened(
    tmp_path_factory: Any,
    place: str,
    envs: int,
    stack: int,
    n_step: int,
    capacity: int,
    prioritized: bool,
    lengths: list[int],
    seed: int,
) -> None:
    scene = EnvConfig(num_envs=envs, frame_stack=stack, crash_rate=0.05)
    arguments = (place, scene, capacity, n_step, 0.9, prioritized)
    replay, _ = make_replay(*arguments)
    traffic = SyntheticEnvs(scene, seed)
    replay.start(traffic.first())
    directory, before = tmp_path_factory.mktemp("replay"), None
    for number, length in enumerate(lengths):
        feed(replay, list(traffic.timesteps(length)))
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
        rows = list(traffic.timesteps(20))
        feed(replay, rows)
        feed(other, rows)


def files(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in path.iterdir()}


def test_complete_blocks_are_written_once(tmp_path: Path) -> None:
    scene = EnvConfig(num_envs=2)
    replay, _ = make_replay("host", scene, 1000, 3, 0.9, True)
    traffic = SyntheticEnvs(scene, 0)
    replay.start(traffic.first())
    feed(replay, list(traffic.timesteps(100)))
    write(tmp_path / "one", replay, None)
    feed(replay, list(traffic.timesteps(100)))
    write(tmp_path / "two", replay, tmp_path / "one")
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    shared = {name for name in one if two.get(name) == one[name]}
    complete = {n for n in one if n.startswith("replay-0")}
    assert len(complete) > 10
    assert shared == complete


def test_rows_are_not_overwritten_before_they_are_written(tmp_path: Path) -> None:
    """A replay that turns over many times while a slow disk writes it."""
    scene = EnvConfig(num_envs=2)
    arguments = ("host", scene, 200, 3, 0.9, True)
    replay, _ = make_replay(*arguments)
    traffic = SyntheticEnvs(scene, 0)
    replay.start(traffic.first())
    feed(replay, list(traffic.timesteps(150)))
    twin, _ = make_replay(*arguments, seed=1)
    twin.load_state_dict(replay.state_dict())
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
    for row in traffic.timesteps(1000):
        kept_up = threading.Thread(target=save.wait_for_overwrite, daemon=True)
        kept_up.start()
        while kept_up.is_alive():  # the loop waits: let one more block be written
            may_write.release()
            waited += 1
            kept_up.join(0.01)
        replay.add(*row)
    for _ in range(1000):
        may_write.release()
    writer.join()
    assert waited
    loaded, _ = make_replay(*arguments, seed=2)
    load_replay(loaded, tmp_path / "one")
    assert all(map(torch.equal, learn(twin, 3), learn(loaded, 3)))


def test_a_failed_write_does_not_hold_the_loop_up(tmp_path: Path) -> None:
    scene = EnvConfig()
    replay, _ = make_replay("host", scene, 50, 1, 0.9, False)
    traffic = SyntheticEnvs(scene, 0)
    replay.start(traffic.first())
    feed(replay, list(traffic.timesteps(200)))
    save = ReplaySave(replay, None)
    with pytest.raises(FileNotFoundError):
        write_archive(Files(), tmp_path / "missing" / "one", save.parts(), {})
    save.close()
    for row in traffic.timesteps(200):
        save.wait_for_overwrite()
        replay.add(*row)


class Late(Files):
    """A disk that answers only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def make_directory(self, path: Path) -> None:
        self.answers.wait()
        super().make_directory(path)


def test_the_row_after_a_save_waits_too(tmp_path: Path) -> None:
    scene, disk = EnvConfig(), Late()
    replay, _ = make_replay("host", scene, 50, 1, 0.9, False)
    traffic = SyntheticEnvs(scene, 0)
    replay.start(traffic.first())
    feed(replay, list(traffic.timesteps(200)))  # full: every row overwrites one
    saver = Saver(
        CheckpointSettings(every=1, seconds=0, keep=1, replay=True), tmp_path, {}, files=disk
    )
    agent = Weightless(replay)
    saver.attach(agent, agent, agent)  # type: ignore[arg-type]
    saved_row = replay.timestep

    def go_on() -> None:
        saver.after_step(1, None, best=False, asked=False)
        for row in traffic.timesteps(1):
            replay.add(*row)
        saver.after_step(1, None, best=False, asked=False)

    loop = threading.Thread(target=go_on, daemon=True)
    loop.start()
    while saver._replay is None or not saver._replay._written._waiters:  # type: ignore[attr-defined]
        assert loop.is_alive(), "waited for nothing"
    assert replay.timestep == saved_row, "a row that was to be saved is overwritten"
    disk.answers.set()
    loop.join()
    saver.finish(1, None)


class NoRoom(Files):
    """A disk that has no room for another directory."""

    def make_directory(self, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


class Weightless(Stateful):
    """All that a saver asks of an agent."""

    updates = 0
    state_names = ()

    def __init__(self, replay: ReplayBuffer) -> None:
        self.replay = replay

    def weights(self) -> dict[str, torch.Tensor]:
        return {}


def test_a_save_that_fails_at_once_does_not_hold_the_loop_up(tmp_path: Path) -> None:
    scene = EnvConfig()
    replay, _ = make_replay("host", scene, 50, 1, 0.9, False)
    traffic = SyntheticEnvs(scene, 0)
    replay.start(traffic.first())
    feed(replay, list(traffic.timesteps(200)))  # full: every row overwrites one
    saver = Saver(
        CheckpointSettings(every=1, seconds=0, keep=1, replay=True), tmp_path, {}, files=NoRoom()
    )
    agent = Weightless(replay)
    saver.attach(agent, agent, agent)  # type: ignore[arg-type]
    saver.save(200, None)

    def go_on() -> None:
        for row in traffic.timesteps(60):
            saver.after_step(0, None, best=False, asked=False)
            replay.add(*row)

    loop = threading.Thread(target=go_on, daemon=True)
    loop.start()
    loop.join(60)
    assert not loop.is_alive(), "waits for a save that is over"


def test_blocks_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    scene = EnvConfig()
    replay, _ = make_replay("host", scene, 100, 1, 0.9, False)
    traffic = SyntheticEnvs(scene, 0)
    replay.start(traffic.first())
    feed(replay, list(traffic.timesteps(100)))
    parts = dict(ReplaySave(replay, None).parts())
    names = sorted(name for name in parts if name.startswith("replay-0"))
    swapped = {**parts, names[1]: parts[names[2]], names[2]: parts[names[1]]}
    write_archive(Files(), tmp_path / "swapped", swapped.items(), {})
    with pytest.raises(CheckpointError, match="holds rows"):
        load_replay(make_replay("host", scene, 100, 1, 0.9, False)[0], tmp_path / "swapped")
    missing = {name: part for name, part in parts.items() if name != names[1]}
    write_archive(Files(), tmp_path / "missing", missing.items(), {})
    with pytest.raises(CheckpointError, match="holds no"):
        load_replay(make_replay("host", scene, 100, 1, 0.9, False)[0], tmp_path / "missing")


def transitions(*replays: ReplayBuffer) -> set[tuple[float, ...]]:
    """Draw until everything is drawn."""
    found = set()
    for replay in replays:
        for _ in range(40):
            obs, action, reward, discount, following, *_ = replay.sample(64, beta=1.0)
            parts = (obs, action[:, None], reward[:, None], discount[:, None], following)
            rows = torch.cat([part.double().flatten(1) for part in parts], 1)
            found |= {tuple(row) for row in rows.tolist()}
    return found


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("rows", [30, 90], ids=["not full", "overwritten"])
def test_a_replay_is_shared_out_among_others(tmp_path: Path, rows: int, stack: int) -> None:
    scene = EnvConfig(num_envs=2, mean_length=6.0, frame_stack=stack)
    shape = {"n_step": 2, "gamma": 0.9, "prioritized": True}
    replay, _ = make_replay("host", scene, capacity=80, **shape)
    traffic = SyntheticEnvs(scene, seed=1)
    replay.start(traffic.first())
    feed(replay, [traffic.step() for _ in range(rows)])
    path = tmp_path / "step-000000000001"
    write_archive(Files(), path, ReplaySave(replay, None, "rank0001-").parts(), {})

    whole, _ = make_replay("host", scene, capacity=100, **shape)
    append_timesteps(whole, saved_timesteps(path, "rank0001-", 0, 1))
    # The first stacks of a stretch may reach back beyond it.
    lost = transitions(replay) - transitions(whole)
    assert transitions(whole) <= transitions(replay)
    assert len(lost) <= (stack - 1) * scene.num_envs
    halves = [make_replay("host", scene, capacity=50, **shape)[0] for _ in range(2)]
    for share, half in enumerate(halves):
        append_timesteps(half, saved_timesteps(path, "rank0001-", share, 2))
    # What reaches from one stretch to the other is in neither.
    missing = transitions(replay) - transitions(*halves)
    assert transitions(*halves) <= transitions(replay)
    assert len(missing) <= 2 * stack * scene.num_envs
