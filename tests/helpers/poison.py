"""Checkpoints with one corrupted value and matching hashes, and how a run resumed from them ends.

A corrupted value is one that no run has (wrong kind, shape or type, not finite, out of range,
inconsistent with another), or one without influence on learning. So a run must either exit with 3,
or end with the weights of the uncorrupted run. Not included are values that another run may have:
another finite weight, reward or observation, another generator state, an episode that has ended or
not.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from logged_runs import Lines, opened
from opened import job
from safetensors.torch import load_file, save_file

from steadyrl.core.errors import ExpectedError
from steadyrl.loop import train
from steadyrl.training.checkpoints.manifest import CheckpointError, entry_of, saved_below, self_hash
from steadyrl.training.checkpoints.saver import Saver
from steadyrl.training.cli.failures import one_line_errors
from steadyrl.training.policies.policy import run_metadata
from steadyrl.training.setup import build

MISSING = object()
EXTRA = "one_more"  # a name that no part has
HANGS = 60  # seconds until a run counts as hanging
COMMON = (
    *("device=cpu", "threads=1", "eval.every=0", "log.every=1000"),
    *("checkpoint.keep=9", "checkpoint.seconds=0", "resume=auto", "env.backend=kernel"),
)
DQN = (
    *("agent=dqn", "agent.hidden=[8]", "agent.learning_starts=40", "agent.batch_size=8"),
    *("agent.train_every=4", "agent.replay.prioritized=true", "agent.replay.capacity=64"),
    *("agent.n_step=3", "agent.updates_per_train=1", "agent.target_every=20"),
    "agent.compile=false",
)
PPO = ("agent=ppo", "agent.compile=false", "agent.hidden=[8]", "agent.rollout_steps=32",
       "agent.minibatches=2", "agent.epochs=1")  # fmt: skip
POLE = ("agent.teacher.policy=pole_teacher:Pole", "agent.teacher.acts=0.5")
SYNC = ("env.backend=sync", "env.max_restarts=0")
MASKED = ("env.id=masked_envs:StampedMasks-v0", "+env.kwargs.actions=3", "+env.kwargs.length=7")
SHORT = ("total_steps=240", "checkpoint.every=150", "env.num_envs=2")
CASES = {
    "dqn": ("env=cartpole", *DQN, *SHORT),
    "ppo": (
        *("env=cartpole", *PPO, *SHORT),
        *("agent.normalize_obs=true", "agent.normalize_reward=true"),
    ),
    "dqn-table": ("env.id=FrozenLake-v1", *DQN, *SHORT, "agent.noisy.enabled=true"),
    "ppo-box": ("env.id=Pendulum-v1", *PPO, *SHORT, "agent.popart=true"),
    "dqn-image": ("env.id=MinAtar/Breakout-v1", *DQN, *SHORT, "env.frame_stack=2"),
    "ppo-image": ("env.id=MinAtar/Seaquest-v1", *PPO, *SHORT),
    "ppo-memory": ("env.id=MinAtar/Asterix-v1", *PPO, *SHORT, "agent.recurrent.cell=gru"),
    "dqn-rainbow": (
        *("env.id=Acrobot-v1", *DQN, *SHORT, "agent.noisy.enabled=true", "agent.dueling=true"),
        *(
            "agent.distribution.kind=c51",
            "agent.distribution.atoms=5",
            "agent.munchausen.enabled=true",
        ),
    ),
    "dqn-teacher": (
        "env=cartpole",
        *DQN,
        *SHORT,
        *POLE,
        "agent.distribution.kind=quantile",
        "agent.distribution.atoms=5",
    ),
    "ppo-teacher": (
        "env=cartpole",
        *PPO,
        *SHORT,
        *POLE,
        "agent.popart=true",
        "agent.normalize_obs=true",
    ),
    "ppo-rnd": ("env.id=MountainCar-v0", *PPO, *SHORT, "agent.rnd.coef=1"),
    "ppo-rnd-lstm": (
        *("env=cartpole", *PPO, *SHORT, "agent.rnd.coef=1", "agent.recurrent.cell=lstm"),
        *(
            "agent.recurrent.size=4",
            "agent.recurrent.sequence_length=8",
            "agent.normalize_obs=true",
        ),
    ),
    "dqn-sync": (*MASKED, *DQN, *SHORT, *SYNC),
    "ppo-sync": ("env.id=Pendulum-v1", *PPO, *SHORT, *SYNC, "env.frame_stack=2"),
    "dqn-sync-image": (*MASKED, "+env.kwargs.kind=image", *DQN, *SHORT, *SYNC, "env.frame_stack=2"),
    "ppo-sync-image": (*MASKED, "+env.kwargs.kind=image", *PPO, *SHORT, *SYNC, "env.frame_stack=2"),
}


class Poison(NamedTuple):
    """A corruption: a path within a JSON document, or a tensor's name, and the new value."""

    file: str
    where: tuple[Any, ...]
    what: str
    value: Any  # of a tensor: a function of it

    def __str__(self) -> str:
        return f"{self.file}: {'.'.join(map(str, self.where))} {self.what}"

    def spoil(self, checkpoint: Path) -> None:
        """Apply it to a checkpoint, with matching hashes."""
        path = checkpoint / self.file
        if path.suffix == ".json":
            document = json.loads(path.read_text())
            inside = document
            for key in self.where[:-1]:
                inside = inside[key]
            if self.value is MISSING:
                del inside[self.where[-1]]
            else:
                inside[self.where[-1]] = self.value
            path.write_text(json.dumps(document))
        else:
            tensors, name = load_file(path), self.where[0]
            if self.value is MISSING:
                del tensors[name]
            elif name in tensors:
                tensors[name] = self.value(tensors[name]).contiguous()
            else:
                tensors[name] = self.value(torch.zeros(2))
            save_file(tensors, path)
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        if self.file != "manifest.json":
            manifest["files"][self.file] = entry_of(path.read_bytes())
        manifest["sha256"] = self_hash(manifest)
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def number(name: str) -> dict[str, str]:
    return {"$number": name}


OTHERS: list[Any] = [None, "7", [], {}, [[0]], {"$tensor": "none"}]
HUGE = [2**63, -(2**70), 10**30]


def in_place_of(value: Any) -> list[Any]:
    """Return values of the wrong kind for `value`."""
    if value is None:
        return [["x"], {"x": 1}, {"$tensor": "none"}]
    if isinstance(value, bool):
        return [*OTHERS, 0, 1, number("nan")]
    if isinstance(value, int):
        floats = [1.5, number("nan"), number("inf"), True]
        # The state of PCG64 has 128 bits.
        return [
            *OTHERS,
            -1 if value >= 0 else -2,
            *([-(2**130)] if value > 2**64 else HUGE),
            *floats,
        ]
    if isinstance(value, float):
        return [*OTHERS, True, number("nan"), number("inf"), number("-inf"), 10**400, 1e308]
    return [None, 5, True, [], {}, "no such thing", "x" * 1000]


def in_document(file: str, value: Any, path: tuple[Any, ...] = ()) -> Iterator[Poison]:
    """Yield corruptions of every leaf and branch of a document."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        here = (*path, key)
        if here == ("metadata", "config"):  # a record: the run has its own configuration
            yield from (Poison(file, here, f"= {each!r}", each) for each in (None, [], 5))
        elif isinstance(item, dict | list):
            known = "$tensor" in item or "$number" in item
            other = [[], "x", 5, {"$tensor": "none"}] if item else ["x", 5]
            other = [each for each in other if each != item]
            yield from (Poison(file, here, f"= {each!r}", each) for each in [None, *other])
            if not known:
                yield from in_document(file, item, here)
        else:
            for each in in_place_of(item):
                if each != item or type(each) is not type(item):
                    yield Poison(file, here, f"= {str(each)[:40]} (was {item!r:.40})", each)
        if isinstance(value, dict):
            yield Poison(file, here, "missing", MISSING)
    if isinstance(value, dict):
        yield from (Poison(file, (*path, EXTRA), f"= {each!r}", each) for each in (7, None, []))


Change = Callable[[torch.Tensor], torch.Tensor]


def one(value: Any, place: int = -1) -> Change:
    """Return a function that changes one element of a tensor."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.clone().reshape(-1)
        flat[place] = value
        return flat.view(tensor.shape)

    return changed


def every(value: Any) -> Change:
    return lambda tensor: torch.full_like(tensor, value)


def of_type(dtype: torch.dtype) -> Change:
    return lambda tensor: tensor.to(dtype)


def in_tensor(file: str, name: str, tensor: torch.Tensor) -> Iterator[Poison]:
    """Yield corruptions of a tensor: other types, shapes and invalid numbers."""
    changes: dict[str, Change] = {
        "with an axis more": lambda t: t.unsqueeze(0),
        "of one number": lambda t: torch.zeros((1, 1, 1, 1), dtype=t.dtype),
    }
    if tensor.ndim:
        changes["longer"] = lambda t: torch.cat(
            (t, t[:1] if len(t) else t.new_zeros((1, *t.shape[1:])))
        )
    if len(tensor.shape) and len(tensor):
        changes["shorter"] = lambda t: t[:-1]
        changes["empty"] = lambda t: t[:0]
    for dtype in (torch.float64, torch.float32, torch.int64, torch.int16, torch.uint8):
        if tensor.dtype != dtype:
            changes[f"as {dtype}"] = of_type(dtype)
    if tensor.numel():
        changes |= wrong_numbers(name, tensor)
    yield from (Poison(file, (name,), what, change) for what, change in changes.items())
    yield Poison(file, (name,), "missing", MISSING)


NONE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
NEVER_BELOW_0 = (
    "optimizer_state.exp_avg_sq",
    "leaves",
    "count",
    "square",
    "inv_std",
    "optimizer_state.step",
)
NEVER_LARGE = (
    "optimizer_state.step",
    "noise",
    "weights",
    "optimizer_state.exp_avg",
    "simulation.float_state",
)
AT_ODDS = ("frames", "stack", "next_obs")  # frames that other parts of the checkpoint have too


def wrong_numbers(name: str, tensor: torch.Tensor) -> dict[str, Change]:
    """Return changes to numbers that are not finite or out of range."""
    changes: dict[str, Change] = {}
    if tensor.is_floating_point():
        for word, value in NONE.items():
            changes[f"one {word}"], changes[f"the first {word}"] = one(value), one(value, 0)
            changes[f"all {word}"] = every(value)
        if name.endswith(NEVER_BELOW_0):
            changes["one -1"], changes["all -1"] = one(-1), every(-1)
        if name.endswith(NEVER_LARGE):
            changes["one 1e20"], changes["all 1e30"] = one(1e20, 0), every(1e30)
        if name in AT_ODDS and len(tensor) == 2:
            changes["others"] = lambda t: t + 1
    elif tensor.dtype == torch.bool:
        changes["of byte 2"], changes["of byte 255"] = of_byte(2), of_byte(255)
    elif tensor.dtype == torch.uint8:
        changes |= wrong_bytes(name, tensor)
    else:
        changes |= {f"all {value}": every(value) for value in (-1, -2, 2**31 - 1)}
        if tensor.dtype == torch.int64:
            changes |= wrong_int_state(name, tensor)
    return changes


def of_byte(value: int) -> Change:
    """Return a function that sets booleans to bytes other than 0 and 1."""
    return lambda tensor: torch.full(tensor.shape, value, dtype=torch.uint8).view(torch.bool)


def wrong_bytes(name: str, tensor: torch.Tensor) -> dict[str, Change]:
    if len(tensor) == 5056:  # state of a torch generator
        changes = {"zeros": every(0), "of 255": every(255), "out of words": one(255, 17)}
        return changes | {"more words than there are": one(2, 9)}
    if "flags" in name:
        return {"of 2": every(2), "one 255": one(255), "of 8": every(8)}
    if name in AT_ODDS and len(tensor) == 2:
        return {"others": lambda t: t ^ 255}
    return {}


def wrong_int_state(name: str, tensor: torch.Tensor) -> dict[str, Change]:
    changes = {"one 2^62": one(2**62), "one -2^63": one(-(2**63))}
    if name.endswith("int_state"):
        row = tensor.shape[1]
        for column in range(0, row, max(1, row // 40)):
            changes[f"number {column} 10**6"] = one(10**6, column)
            changes[f"number {column} -10"] = one(-10, row + column)
    return changes


def poisons(checkpoint: Path) -> list[Poison]:
    """Return all corruptions of a checkpoint, in a fixed order."""
    found: list[Poison] = []
    for path in sorted(checkpoint.iterdir()):
        if path.suffix == ".safetensors":
            for name, tensor in sorted(load_file(path).items()):
                found += in_tensor(path.name, name, tensor)
            found.append(Poison(path.name, (EXTRA,), "= zeros", torch.zeros_like))
        else:
            document = json.loads(path.read_text())
            if path.name == "manifest.json":
                del document["sha256"]  # `spoil` sets it
            found += in_document(path.name, document)
    return found


def some_of_each(found: list[Poison], count: int) -> list[Poison]:
    """Return `count` corruptions of every leaf, branch and tensor."""
    of_place: dict[tuple[Any, ...], list[Poison]] = {}
    for poison in found:
        of_place.setdefault((poison.file, *poison.where), []).append(poison)
    draw = random.Random(0).sample
    return [each for some in of_place.values() for each in draw(some, min(count, len(some)))]


class Poisoned:
    """A finished run, its checkpoint from the middle, and how corrupted copies of it end."""

    def __init__(self, folder: Path, name: str) -> None:
        self._chosen, self._folder = (*COMMON, *CASES[name]), folder
        train(job(folder, *self._chosen, quick=False))
        self._run = folder / "run"
        self.weights = self._weights()
        _, *others = reversed(saved_below(self._run / "checkpoints"))
        self.checkpoint = others[0].path  # from the middle
        for saved in saved_below(self._run / "checkpoints"):
            if saved.path != self.checkpoint:
                shutil.rmtree(saved.path)
        self._whole = folder / "whole"
        shutil.copytree(self._run, self._whole)
        self._job = job(folder, *self._chosen, quick=False)  # the configuration is not corrupted
        gc.collect()
        gc.freeze()  # forked children need not scan these objects
        self.poisons = poisons(self.checkpoint)

    @contextmanager
    def screened(self) -> Iterator[Callable[[Poison], str]]:
        """Yield `end`, but without a process where restoring alone rejects the checkpoint.

        Only `CheckpointError` counts, whose code is 3; all other outcomes are those of `end`.
        """
        with build(self._job) as (env, agent):
            saver = Saver(
                self._job.settings.run.checkpoint,
                self._run,
                run_metadata(self._job.config, env.spec, agent),
            )
            saver.attach(opened(self._job, agent, Lines()), env, agent)

            def end(poison: Poison) -> str:
                return "refused" if self._rejects(saver, poison) else self.end(poison)

            yield end
            assert not self._rejects(saver, None), "after the others, the whole one is rejected too"

    def _put_back(self) -> None:
        shutil.rmtree(self._run)
        shutil.copytree(self._whole, self._run)
        (self._run / "summary.json").unlink()

    def _rejects(self, saver: Saver, poison: Poison | None) -> bool:
        self._put_back()
        if poison is not None:
            poison.spoil(self.checkpoint)
        try:
            saver.resume()
        except CheckpointError as error:
            assert str(error).isprintable()
            return True
        except Exception:  # the whole command shows how it ends
            return False
        return False

    def _weights(self) -> Any:
        return json.loads((self._run / "summary.json").read_text())["weights_sha256"]

    def end(self, poison: Poison | None) -> str:
        """Resume the run in a forked process; return "same", "refused", or another outcome."""
        self._put_back()
        if poison is not None:
            poison.spoil(self.checkpoint)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            signal.alarm(HANGS)  # kills it if it hangs
            said = os.open(self._folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os._exit(self._continued())
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return f"signal {os.WTERMSIG(status)}"
        code = os.WEXITSTATUS(status)
        if code == 0:
            return "same" if self._weights() == self.weights else "other weights"
        return "refused" if code == 3 else f"exit {code}"

    def _continued(self) -> int:
        try:
            with one_line_errors():
                train(self._job)
        except ExpectedError as error:
            print(error, file=sys.stderr, flush=True)
            return error.exit_code
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    def said(self) -> str:
        """Return the end of the last run's output."""
        return (self._folder / "said").read_text()[-600:]
