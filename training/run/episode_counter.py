"""Episodes that have ended, and mean rewards of log intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from steadyrl.core.history import History
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.core.state import Stateful
from steadyrl.envs.types import Episode

# At most this many of the episodes between two log lines are logged one by one.
LOGGED = 20
REWARD_MEAN = "rollout/reward_mean"


class EpisodeCounter(Stateful):
    """The last `history` finished episodes of training, and means over the last `mean_window`."""

    state_names = (
        *("_returns", "_lengths", "_infos", "_steps", "_new"),
        *("total_reward", "_logged_reward"),
    )
    state_limits: ClassVar[Mapping[str, Limits]] = {"_new": COUNT}

    def __init__(
        self, history: int, mean_window: int = 100, info_metrics: Sequence[str] = ()
    ) -> None:
        self._window = mean_window
        self._infos = {name: History(mean_window) for name in info_metrics}
        self._returns = History(history)
        self._lengths = History(history)
        self._steps = History(min(LOGGED, history))
        self._new = 0  # episodes not logged yet
        # Sums of the rewards of all steps: of those counted so far, and at the last log line.
        self.total_reward = self._logged_reward = 0.0

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        histories = (self._returns, self._lengths, *self._infos.values())
        if not len(self._returns) == len(self._lengths) >= len(self._steps):
            raise ValueError(
                f"are {[len(each) for each in histories]} numbers of the same episodes"
            )
        if not all(0 <= step < 2**53 and step % 1 == 0 for step in (*self._steps, *self._lengths)):
            raise ValueError("steps and lengths: hold a number that counts no steps")

    def append(self, step: int, episode: Episode) -> None:
        """Add an episode that ended at this step."""
        self._returns.append(episode.return_)
        self._lengths.append(episode.length)
        for name, value in episode.info.items():
            self._infos[name].append(value)
        self._steps.append(step)
        self._new += 1

    @property
    def count(self) -> int:
        """Episodes that the means are over."""
        return min(len(self._returns), self._window)

    @property
    def return_mean(self) -> float | None:
        """Mean return; None before the first episode ends."""
        return self._returns.mean_of_last(self._window) if len(self._returns) else None

    def scalars(self) -> dict[str, float]:
        """Return the means to log by tag; empty before the first episode ends."""
        if not len(self._returns):
            return {}
        return {
            "rollout/return_mean": self._returns.mean_of_last(self._window),
            "rollout/length_mean": self._lengths.mean_of_last(self._window),
        } | {f"rollout/info/{name}": values.mean for name, values in self._infos.items()}

    def pop_reward_mean(self, steps: int) -> dict[str, float]:
        """Return the mean reward of the `steps` steps since the last call, by its tag."""
        gained, self._logged_reward = self.total_reward - self._logged_reward, self.total_reward
        return {REWARD_MEAN: gained / steps} if steps else {}

    def pop_new(self) -> tuple[list[tuple[int, float]], list[float]]:
        """Return (step, return) of the episodes not logged yet, and all returns if any are new."""
        if not self._new:
            return [], []
        returns, steps = list(self._returns), [int(step) for step in self._steps]
        many = min(self._new, len(steps))
        self._new = 0
        return list(zip(steps[-many:], returns[-many:], strict=True)), returns
