"""Episodes of a policy as arrays, written to one npz file as they end."""

from __future__ import annotations

import json
import os
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.agents.base import Actor
from steadyrl.core.errors import SettingError
from steadyrl.envs.encoding.spaces import parts_of
from steadyrl.envs.factory import build_watched_env
from steadyrl.envs.settings import EnvSettings

Arrays = dict[str, NDArray[Any]]
FORMAT = 2


class RecordedEnvs:
    """Environments whose observations are kept as they gave them, besides the encoded ones."""

    def __init__(self, settings: EnvSettings, *, seed: int, num_envs: int) -> None:
        self._id = settings.id
        self.current: list[Arrays] = [{}] * num_envs  # parts of each environment's observation
        self.env, self.env_actions = build_watched_env(
            settings, self._watch, seed=seed, num_envs=num_envs
        )

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    def _watch(self, observation: Any, space: spaces.Space[Any], index: int | None) -> None:
        masked = self.env.spec.mask
        seen, mask = observation if masked else (observation, None)
        found: Arrays = {}
        for name, part in _parts("observations", space, seen):
            if name in found:
                reason = f"two parts of its observation would be {name} in the file"
                raise SettingError("env.id", self._id, reason)
            found[name] = part
        if index is None:
            for i in range(len(self.current)):
                self.current[i] = {name: batch[i] for name, batch in found.items()}
            return
        self.current[index] = found if mask is None else {**found, "action_masks": mask.copy()}


def _parts(
    name: str, space: spaces.Space[Any], observation: Any
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of an observation: of a Dict's or Tuple's parts one each."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in parts_of(space):
            yield from _parts(f"{name}/{key}", part, observation[key])
    else:
        yield name, np.array(observation)  # a copy: environments may reuse their memory


class _Running:
    """The steps so far of one episode."""

    def __init__(self) -> None:
        self.observations: list[Arrays] = []
        self.steps: list[tuple[Any, ...]] = []  # action, reward, terminated, truncated

    def arrays(self, last: Arrays, *, cut: bool) -> Arrays:
        """Return the episode's arrays; `last`: its final observation."""
        seen = [*self.observations, last]
        columns = map(np.asarray, zip(*self.steps, strict=True))
        actions, rewards, terminated, truncated = columns
        truncated[-1] |= cut
        return {name: np.stack([each[name] for each in seen]) for name in last} | {
            "actions": actions,
            "rewards": rewards.astype(np.float32),
            "terminated": terminated,
            "truncated": truncated,
        }


def play_episodes(
    recorded: RecordedEnvs,
    actor: Actor,
    episodes_per_env: Sequence[int],
    *,
    max_episode_steps: int,
    write: Callable[[Arrays], None],
) -> None:
    """Play as an evaluation does, that many episodes per environment, and write each as it ends.

    An episode that reaches the limit is truncated there, and its environment plays no other.
    """
    env = recorded.env
    env.reset()
    left = np.array(episodes_per_env)
    running = [_Running() for _ in left]
    while left.any():
        before = list(recorded.current)
        action = actor.act(env.observation, env.episode_starts).env_action.numpy(force=True)
        taken = recorded.env_actions(action.copy())
        step = env.step(action)
        over = step.terminated | step.truncated
        for i in np.flatnonzero(left > 0).tolist():
            if not step.valid[i]:  # it was reset
                running[i] = _Running()
                continue
            outcome = (step.reward[i], step.terminated[i], step.truncated[i])
            running[i].observations.append(before[i])
            running[i].steps.append((taken[i], *outcome))
            cut = not over[i] and len(running[i].steps) >= max_episode_steps
            if over[i] or cut:
                write(running[i].arrays(recorded.current[i], cut=cut))
                left[i] = 0 if cut else left[i] - 1
                running[i] = _Running()


class EpisodeFile:
    """An npz file that episodes are appended to; it gets its name once it is complete."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.count = self.steps = 0
        self._path, self._about = path, dict(about)
        self._unfinished = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(self._unfinished, flags, 0o644), "w+b")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)

    def write(self, episode: Arrays) -> None:
        """Append an episode."""
        for name, array in episode.items():
            self._add(f"episode_{self.count:05d}/{name}", array)
        self.count += 1
        self.steps += len(episode["rewards"])

    def _add(self, name: str, array: NDArray[Any]) -> None:
        with self._zip.open(f"{name}.npy", "w", force_zip64=True) as entry:
            np.lib.format.write_array(entry, array, allow_pickle=False)

    def __enter__(self) -> EpisodeFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Complete the file, or remove it after an exception."""
        try:
            if kind is None:
                about = self._about | {"format": FORMAT, "episodes": self.count}
                self._add("about", np.array(json.dumps(about)))
                self._zip.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(self._unfinished, self._path)
        finally:
            for each in (self._zip, self._file):
                with suppress(OSError, ValueError):  # of a full disk; the file is removed
                    each.close()
            self._unfinished.unlink(missing_ok=True)
