"""`summary.json`: the result of a run, for scripts."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from steadyrl.core.files import rounded, write_atomic
from steadyrl.core.saved_state import COUNT, UNKNOWN_YET, Limits
from steadyrl.core.state import Stateful
from steadyrl.training.checkpoints.run_directory import SUMMARY

log = logging.getLogger("steadyrl")


@dataclass
class Summary(Stateful):
    """The keys of `summary.json`; unknown numbers are null."""

    # Not recomputed on resume.
    state_limits: ClassVar[Mapping[str, Limits]] = {
        "episodes": COUNT,
        "eval_return_mean": UNKNOWN_YET,
        "eval_return_std": UNKNOWN_YET,
        "eval_episodes": COUNT,
        "best_eval_return_mean": UNKNOWN_YET,
    }
    state_names = tuple(state_limits)

    status: str
    run_dir: str
    agent: str
    env: str
    seed: int
    steps: int = 0
    updates: int = 0
    episodes: int = 0
    return_mean: float | None = None
    eval_return_mean: float | None = None
    eval_return_std: float | None = None
    eval_episodes: int = 0
    best_eval_return_mean: float | None = None
    steps_per_second: float = 0.0
    wall_seconds: float = 0.0
    # Change of the speed since the warm-up, or the last resume, with bounds of 95 %.
    speed_trend_percent: float | None = None
    speed_trend_percent_low: float | None = None
    speed_trend_percent_high: float | None = None
    # Fractions of `wall_seconds`; evaluation has videos and reports too.
    time_share_environment: float = 0.0
    time_share_act: float = 0.0
    time_share_update: float = 0.0
    time_share_other: float = 0.0
    time_share_evaluation: float = 0.0
    rss_mb_peak: float = 0.0  # of this process
    tree_mb_peak: float = 0.0  # of the process tree: Σ PSS and pages in swap
    cuda_mb_peak: float | None = None  # allocated on the card
    memory_limit: str | None = None  # the limit on memory that left least at the end
    cleanings: int = 0  # of caches, by this process
    cleaned_mb: float = 0.0  # what they gave back
    resumed_from_step: int | None = None
    stopped_by: str | None = None  # the callback that ended the run, and why
    weights_sha256: str | None = None
    mirror_complete: bool | None = None  # whether checkpoint.mirror has everything

    def add_evaluation(self, mean: float, std: float, episodes: int) -> bool:
        """Take the result of an evaluation; return whether it is the best so far."""
        self.eval_return_mean, self.eval_return_std, self.eval_episodes = mean, std, episodes
        best = self.best_eval_return_mean is None or mean > self.best_eval_return_mean
        if best:
            self.best_eval_return_mean = mean
        return best

    def save(self, directory: Path) -> str | None:
        """Write the file atomically; on failure warn and return the reason."""
        values = {k: _plain(v) for k, v in asdict(self).items()}
        try:
            write_atomic(directory / SUMMARY, json.dumps(values, indent=2) + "\n")
        except OSError as error:
            reason = error.strerror or str(error)
            log.warning("cannot write summary.json: %s", reason)
            return reason
        return None


def _plain(value: object) -> object:
    if isinstance(value, float):
        return rounded(value) if math.isfinite(value) else None
    return value


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors: equal hashes mean equal policies, bit for bit."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
