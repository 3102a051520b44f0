"""Backend of kernel environments: one compiled function steps all N environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from steadyrl.core.jit import address_of
from steadyrl.core.saved_state import LARGEST, LARGEST_SEED, Saved
from steadyrl.envs.encoding.spaces import action_decoder
from steadyrl.envs.encoding.step_buffer import (
    StepBuffer,
    action_layout,
    backend_kind,
    load_progress,
)
from steadyrl.envs.faults import Faults
from steadyrl.envs.kernels.api import find_kernel
from steadyrl.envs.kernels.kernel import Kernel, Range
from steadyrl.envs.kernels.mt19937 import LENGTH, PLACE
from steadyrl.envs.kernels.mt19937 import WORDS as TWISTER_WORDS
from steadyrl.envs.kernels.pcg64 import HALF, INC_HIGH, INC_LOW, KEPT
from steadyrl.envs.kernels.state import (
    ELAPSED,
    EPISODE,
    LIMIT,
    NEEDS_RESET,
    Outcome,
    new_simulation,
    seed_words,
    valid_actions,
)
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import Encoder, EnvSpec
from steadyrl.envs.vector import Backend

WORD_32 = 2**32 - 1


class KernelBackend(Backend):
    """Holds the arrays that a kernel works on; snapshots are copies of them.

    Episodes have the same seeds as with `sync`, so both backends return the same steps.
    """

    def __init__(self, settings: EnvSettings, *, seed: int) -> None:
        found = find_kernel(settings)
        self.kernel = kernel = found.make()
        self.spec = _spec(settings, kernel)
        self.limits = (0.0, 255.0) if kernel.images else None
        self.faults = Faults(settings.max_restarts, settings.role)
        self.sim = new_simulation(kernel, settings.num_envs, found.limit, seed)
        self._seed = seed
        self._num_actions = kernel.action.n if isinstance(kernel.action, spaces.Discrete) else None
        self._address: int | None = None
        dtype, shape = action_layout(self.spec.action)
        self.action: NDArray[Any] = np.zeros((settings.num_envs, *shape), dtype)

    def buffers(self) -> tuple[StepBuffer, StepBuffer]:
        """Return the two step buffers, which are filled alternately."""
        rows = super().buffers()
        one, two = (
            Outcome(out.obs, out.reward, out.terminated, out.truncated, out.valid) for out in rows
        )
        self.outcomes = one, two
        return rows

    def address(self) -> int:
        """Return the address of the kernel's machine code; 0 if it is not compiled."""
        if self._address is None:
            self._address = address_of(self.kernel.step, self.sim, self.action, self.outcomes[0])
        return self._address or 0

    def close(self) -> None:
        """Do nothing: kernels hold no resources."""

    def start(self, out: StepBuffer) -> None:
        """Reset every environment and write the first frames into `out`."""
        self.sim.clock[:, NEEDS_RESET] = True
        self.action[:] = 0
        self.step_wait(out)

    def step_async(self, action: NDArray[Any], out: StepBuffer) -> None:
        """Store the actions [N, …]; the step is computed in `step_wait`."""
        self.action[:] = action

    def step_wait(self, out: StepBuffer) -> None:
        """Step every environment and fill `out`."""
        action = self.action
        try:
            if self._num_actions is not None and not valid_actions(action, self._num_actions):
                raise ValueError(f"actions {action.tolist()} lie outside 0…{self._num_actions - 1}")
            self.kernel.step(self.sim, action, self.outcomes[out.slot])
        except BaseException as error:
            self.faults.give_up(self.spec.id, error)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain values: what `sync` saves, and the simulation's arrays."""
        sim = self.sim
        return {
            "backend_kind": "kernel",
            "seed": self._seed,
            "episode": sim.clock[:, EPISODE].tolist(),
            "needs_reset": (sim.clock[:, NEEDS_RESET] > 0).tolist(),
            "simulation": {
                "float_state": sim.float_state,
                "int_state": sim.int_state,
                "elapsed": sim.clock[:, ELAPSED],
                "generators": sim.generators.view(np.int64),
            },
        }

    def restore(
        self, saved: dict[str, Any], past_actions: list[NDArray[Any] | None], out: StepBuffer
    ) -> NDArray[np.bool_]:
        """Restore a snapshot; one of another backend makes all environments reset."""
        state = Saved(saved, "backend")
        whole = backend_kind(state) == "kernel"
        seed = state.whole("seed", 0, LARGEST_SEED)
        progress = load_progress(saved, self.spec.num_envs)
        if whole:  # checked before anything is changed
            arrays = self._arrays_in(state.inside("simulation"), progress)
        self._seed = seed
        self.sim = sim = self.sim._replace(seed=seed_words(seed))
        sim.clock[:, EPISODE] = progress[:, 0]
        sim.clock[:, NEEDS_RESET] = progress[:, 1] if whole else True
        if whole:
            sim.float_state[:], sim.int_state[:], sim.clock[:, ELAPSED], generators = arrays
            sim.generators.view(np.int64)[:] = generators
        return np.full(self.spec.num_envs, whole)

    def _arrays_in(self, saved: Saved, progress: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Return the saved simulation arrays, checked: kernels do not check indices."""
        sim, limit = self.sim, int(self.sim.clock[0, LIMIT])
        float_state, int_state, elapsed, generators = (
            saved.tensor(name, array.shape, dtype).numpy()
            for name, array, dtype in (
                ("float_state", sim.float_state, "float64"),
                ("int_state", sim.int_state, "int64"),
                ("elapsed", sim.clock[:, ELAPSED], "int64"),
                ("generators", sim.generators, "int64"),
            )
        )
        # Before its first episode an environment's state is zeros, which may be out of range.
        new = (progress[:, 1] > 0) & ~int_state.any(axis=1) & ~float_state.any(axis=1)
        _check_limits("float_state", float_state[~new], self.kernel.float_ranges)
        _check_limits("int_state", int_state[~new], self.kernel.int_ranges)
        most = limit - 1 + progress[:, 1] if limit else np.full(len(elapsed), LARGEST)
        if ((elapsed < 0) | (elapsed > most)).any():
            raise ValueError(f"elapsed: is {elapsed.tolist()}, it can be 0 to {most.tolist()}")
        refuse = _check_twisters if sim.generators.shape[1] == TWISTER_WORDS else _check_generators
        refuse(generators.view(np.uint64))
        if self.kernel.validate is not None:
            for env in np.flatnonzero(~new):
                self.kernel.validate(float_state[env], int_state[env])
        return float_state, int_state, elapsed, generators

    def force_reset(self, env: int) -> None:
        """Make the next step of an environment a reset."""
        self.sim.clock[env, NEEDS_RESET] = True


def _spec(settings: EnvSettings, kernel: Kernel) -> EnvSpec:
    encoder = Encoder(kernel.frame, kernel.dtype, _write_nothing, one_hot=kernel.one_hot)
    return EnvSpec.of(settings, encoder, action_decoder(kernel.action).spec)


def _check_limits(name: str, numbers: NDArray[Any], ranges: Sequence[Range]) -> None:
    """Raise ValueError for numbers [N, R] out of range."""
    least, most = np.array(ranges, numbers.dtype).reshape(-1, 2).T
    wrong = np.argwhere((numbers < least) | (numbers > most))
    if len(wrong):
        env, column = wrong[0].tolist()
        where = f"{name}: number {column} of environment {env} is {numbers[env, column]}"
        raise ValueError(f"{where}, it can be {least[column]} to {most[column]}")


def _check_twisters(twisters: NDArray[np.uint64]) -> None:
    """Raise ValueError for invalid states of Mersenne twisters [N, 625]."""
    for env, twister in enumerate(twisters):
        begun = bool(twister.any())  # zeros before the first episode
        if twister[PLACE] > LENGTH:
            raise ValueError(
                f"generators: the next word of environment {env} is {int(twister[PLACE])}, it can "
                f"be 0 to {LENGTH}"
            )
        if twister.max() > WORD_32 or (begun and not twister[:LENGTH].any()):
            raise ValueError(f"generators: environment {env} has no valid Mersenne twister state")


def _check_generators(generators: NDArray[np.uint64]) -> None:
    """Raise ValueError for impossible states of NumPy's default generator [N, 6]."""
    for env, words in enumerate(generators):
        begun = bool(words.any())
        if words[KEPT] > 1 or words[HALF] > WORD_32 or (begun and not words[INC_LOW] % 2):
            raise ValueError(
                f"generators: environment {env} has increment {int(words[INC_HIGH])}, "
                f"{int(words[INC_LOW])} and keeps {int(words[KEPT])}, {int(words[HALF])}: an odd "
                f"number, 0 or 1, and 0 to {WORD_32} they can be"
            )


def _write_nothing(*_: Any) -> None:
    """Do nothing: kernels write frames themselves."""
