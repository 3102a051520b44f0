"""N environments of which one compiled function makes every row."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.faults import Faults
from envs.kernel import Kernel, find_kernel
from envs.kernel_steps import (
    ELAPSED,
    EPISODE,
    OVER,
    Outcome,
    new_simulation,
    seed_words,
    within,
)
from envs.row import Row, action_form
from envs.settings import EnvSettings
from envs.spaces import action_decoder
from envs.types import Encoder, EnvSpec
from envs.vector import Backend
from memory.compiled import address_of


class KernelBackend(Backend):
    """A thin wrapper around the arrays that a kernel works on, which are saved as they are.

    Episodes have the seeds that `sync` gives them, so that both make the same rows.
    """

    def __init__(self, settings: EnvSettings, *, seed: int) -> None:
        found = find_kernel(settings)
        self.kernel = kernel = found.make()
        self.spec = _spec(settings, kernel)
        self.limits = (0.0, 255.0) if kernel.images else None
        self.faults = Faults(settings.max_restarts)
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
        self._seed, arrays = saved["seed"], saved.get("simulation")
        self.sim = sim = self.sim._replace(seed=seed_words(self._seed))
        sim.clock[:, EPISODE] = saved.get("episode", 0)
        sim.clock[:, OVER] = saved["over"] if arrays else True
        if arrays:
            sim.reals[:] = arrays["reals"].numpy()
            sim.wholes[:] = arrays["wholes"].numpy()
            sim.clock[:, ELAPSED] = arrays["elapsed"].numpy()
            sim.generators.view(np.int64)[:] = arrays["generators"].numpy()
        return np.full(self.spec.num_envs, bool(arrays))

    def cut(self, env: int) -> None:
        """Let the next row of an environment be a reset."""
        self.sim.clock[env, OVER] = True


def _spec(settings: EnvSettings, kernel: Kernel) -> EnvSpec:
    encoder = Encoder(kernel.frame, kernel.dtype, _nothing)
    return EnvSpec.of(settings, encoder, action_decoder(kernel.action).spec)


def _nothing(*_: Any) -> None:
    """Write nothing: kernels write frames themselves."""
