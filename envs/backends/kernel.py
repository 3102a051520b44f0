"""N environments of which one compiled function makes every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.core.jit import address_of
from steadyrl.core.saved import LARGEST, LARGEST_SEED, Saved
from steadyrl.envs.backends.kernel_generators import TWISTER_WORDS, check_generators, check_twisters
from steadyrl.envs.encoding.spaces import action_decoder
from steadyrl.envs.encoding.step_buffer import Row, action_form, made_by, progress_in
from steadyrl.envs.faults import Faults
from steadyrl.envs.kernels.api import find_kernel
from steadyrl.envs.kernels.kernel import Kernel, Range
from steadyrl.envs.kernels.state import (
    ELAPSED,
    EPISODE,
    LIMIT,
    OVER,
    Outcome,
    new_simulation,
    seed_words,
    within,
)
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import Encoder, EnvSpec
from steadyrl.envs.vector import Backend


class KernelBackend(Backend):
    """A thin wrapper around the arrays that a kernel works on, which are saved as they are.

    Episodes have the seeds that `sync` gives them, so that both make the same rows.
    """

    def __init__(self, settings: EnvSettings, *, seed: int) -> None:
        found = find_kernel(settings)
        self.kernel = kernel = found.make()
        self.spec = _spec(settings, kernel)
        self.limits = (0.0, 255.0) if kernel.images else None
        self.faults = Faults(settings.max_restarts, settings.role)
        self.sim = new_simulation(kernel, settings.num_envs, found.limit, seed)
        self._seed = seed
        self._choices = kernel.action.n if isinstance(kernel.action, spaces.Discrete) else None
        self._address: int | None = None
        dtype, shape = action_form(self.spec.action)
        self.action: NDArray[Any] = np.zeros((settings.num_envs, *shape), dtype)

    def rows(self) -> tuple[Row, Row]:
        """Return the two rows that are filled in turn."""
        rows = super().rows()
        one, two = (
            Outcome(row.obs, row.reward, row.terminated, row.truncated, row.valid) for row in rows
        )
        self.outcomes = one, two
        return rows

    def address(self) -> int:
        """Return where the kernel's machine code is; 0 if it is none."""
        if self._address is None:
            self._address = address_of(self.kernel.step, self.sim, self.action, self.outcomes[0])
        return self._address or 0

    def close(self) -> None:
        """Nothing is open."""

    def start(self, row: Row) -> None:
        """Start every environment anew; the row holds their first frames."""
        self.sim.clock[:, OVER] = True
        self.action[:] = 0
        self.collect(row)

    def launch(self, action: NDArray[Any], row: Row) -> None:
        """Keep the actions [N, …] of a step until it is collected."""
        self.action[:] = action

    def collect(self, row: Row) -> None:
        """Make the next row of every environment."""
        action = self.action
        try:
            if self._choices is not None and not within(action, self._choices):
                raise ValueError(f"actions {action.tolist()} lie outside 0…{self._choices - 1}")
            self.kernel.step(self.sim, action, self.outcomes[row.turn])
        except BaseException as error:
            self.faults.give_up(self.spec.id, error)

    def snapshot(self) -> dict[str, Any]:
        """Return the plain state: what `sync` would say, and the arrays of the simulation."""
        sim = self.sim
        return {
            "made_by": "kernel",
            "seed": self._seed,
            "episode": sim.clock[:, EPISODE].tolist(),
            "over": (sim.clock[:, OVER] > 0).tolist(),
            "simulation": {
                "reals": sim.reals,
                "wholes": sim.wholes,
                "elapsed": sim.clock[:, ELAPSED],
                "generators": sim.generators.view(np.int64),
            },
        }

    def restore(
        self, saved: dict[str, Any], past: list[NDArray[Any] | None], row: Row
    ) -> NDArray[np.bool_]:
        """Put a snapshot back; where another backend made it, all start their next episodes."""
        state = Saved(saved, "backend")
        whole = made_by(state) == "kernel" or "simulation" in state
        seed = state.whole("seed", 0, LARGEST_SEED)
        progress = progress_in(saved, self.spec.num_envs)
        if whole:  # looked at before anything is changed
            arrays = self._arrays_in(state.inside("simulation"), progress)
        self._seed = seed
        self.sim = sim = self.sim._replace(seed=seed_words(seed))
        sim.clock[:, EPISODE] = progress[:, 0]
        sim.clock[:, OVER] = progress[:, 1] if whole else True
        if whole:
            sim.reals[:], sim.wholes[:], sim.clock[:, ELAPSED], generators = arrays
            sim.generators.view(np.int64)[:] = generators
        return np.full(self.spec.num_envs, whole)

    def _arrays_in(self, saved: Saved, progress: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Return the saved arrays of the simulation, if its code cannot be led astray by them."""
        sim, limit = self.sim, int(self.sim.clock[0, LIMIT])
        reals, wholes, elapsed, generators = (
            saved.tensor(name, array.shape, dtype).numpy()
            for name, array, dtype in (
                ("reals", sim.reals, "float64"),
                ("wholes", sim.wholes, "int64"),
                ("elapsed", sim.clock[:, ELAPSED], "int64"),
                ("generators", sim.generators, "int64"),
            )
        )
        # What has not begun yet is zeros, which need not be any state of an episode.
        new = (progress[:, 1] > 0) & ~wholes.any(axis=1) & ~reals.any(axis=1)
        _check_limits("reals", reals[~new], self.kernel.real_ranges)
        _check_limits("wholes", wholes[~new], self.kernel.whole_ranges)
        most = limit - 1 + progress[:, 1] if limit else np.full(len(elapsed), LARGEST)
        if ((elapsed < 0) | (elapsed > most)).any():
            raise ValueError(f"elapsed: is {elapsed.tolist()}, it can be 0 to {most.tolist()}")
        refuse = check_twisters if sim.generators.shape[1] == TWISTER_WORDS else check_generators
        refuse(generators.view(np.uint64))
        if self.kernel.validate is not None:
            for env in np.flatnonzero(~new):
                self.kernel.validate(reals[env], wholes[env])
        return reals, wholes, elapsed, generators

    def cut(self, env: int) -> None:
        """Let the next row of an environment be a reset."""
        self.sim.clock[env, OVER] = True


def _spec(settings: EnvSettings, kernel: Kernel) -> EnvSpec:
    encoder = Encoder(kernel.frame, kernel.dtype, _nothing)
    return EnvSpec.of(settings, encoder, action_decoder(kernel.action).spec)


def _check_limits(name: str, numbers: NDArray[Any], ranges: Sequence[Range]) -> None:
    """Refuse numbers [N, R] outside of their ranges."""
    least, most = np.array(ranges, numbers.dtype).reshape(-1, 2).T
    wrong = np.argwhere((numbers < least) | (numbers > most))
    if len(wrong):
        env, column = wrong[0].tolist()
        where = f"{name}: number {column} of environment {env} is {numbers[env, column]}"
        raise ValueError(f"{where}, it can be {least[column]} to {most[column]}")


def _nothing(*_: Any) -> None:
    """Write nothing: kernels write frames themselves."""
