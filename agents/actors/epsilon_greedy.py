"""The ε-greedy actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.actors.greedy import GreedyActor
from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.networks.action_mask import UNIFORM_INT_MAX, Masks
from steadyrl.buffers.memory_layout import HOST
from steadyrl.core.saved_state import Limits, Saved, check_limits, set_numpy_generator
from steadyrl.core.state import to_plain
from steadyrl.envs.types import DiscreteActions, EnvSpec

if TYPE_CHECKING:
    from steadyrl.agents.engine.cpu.network import HostNetwork

TIMESTEPS_DRAWN = 256  # random numbers are drawn for a block of timesteps


class EpsilonGreedyActor(Actor):
    """Take a uniform allowed action with probability ε, drawn per environment, else the greedy one.

    The greedy actor's state, such as hidden states or the generator of its noise, is part of
    its state, apart from its own.
    """

    def __init__(
        self,
        greedy: Actor,
        spec: EnvSpec,
        *,
        epsilon: Callable[[], float],
        seed: int,
    ) -> None:
        assert isinstance(spec.action, DiscreteActions)
        self._greedy, self._actions, self._masks = greedy, spec.action.n, Masks.of(spec, HOST)
        self.on_host, self._act_on_host = _compiled(greedy)
        self._sync_weights = greedy.sync_weights if isinstance(greedy, GreedyActor) else None
        self.reads_host_weights = self._sync_weights is not None
        self._epsilon = epsilon
        # With masks, reduced to the allowed actions later.
        self._drawn_below = self._actions if self._masks is None else UNIFORM_INT_MAX
        self._generator = np.random.Generator(np.random.PCG64(seed))
        # Saved in place of the drawn numbers: loading draws them again from it.
        self._state_before_draw = self._generator.bit_generator.state
        self.uniforms = np.zeros((TIMESTEPS_DRAWN, 0))
        self.random_actions = np.zeros((TIMESTEPS_DRAWN, 0), np.int64)
        self.next = 0
        self._needs_redraw = False  # after loading a state

    @property
    @override
    def nbytes(self) -> int:
        return self._greedy.nbytes

    @override
    def check_actions(self, action: Tensor) -> None:
        check_limits(action, Limits(0, self._actions - 1))

    @override
    def check_decision(self, decision: Decision) -> None:
        self._greedy.check_decision(decision)

    def act(self, obs: NDArray[Any], episode_starts: NDArray[np.bool_]) -> Decision:
        """Return ε-greedy actions for observations [N, …]."""
        uniforms, random_actions = self._next_draws(len(obs))
        if self.on_host is not None:
            if self._sync_weights is not None:
                self._sync_weights()
            action = np.empty((len(obs), 1), np.int64)
            self._act_on_host(
                self.on_host.layer_table,
                self.on_host.activation,
                np.ascontiguousarray(obs, np.float32).reshape(len(obs), -1),
                uniforms,
                random_actions,
                self._epsilon(),
                action,
            )
            return Decision(torch.from_numpy(obs), torch.from_numpy(action[:, 0]))
        random = uniforms < self._epsilon()
        greedy = self._greedy.act(obs, episode_starts)
        if self._masks is not None and random.any():
            random_actions = self._masks.sample_allowed(random_actions, obs)
        action = np.where(random, random_actions, greedy.env_action.numpy(force=True))
        return greedy._replace(env_action=torch.from_numpy(action))

    def restore_draws(self, num_envs: int) -> None:
        """Redraw a restored actor's numbers, for compiled code that reads them without `act`."""
        if self._needs_redraw and self.next:
            self._draw(num_envs)

    def _next_draws(self, num_envs: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the uniforms and random actions [N] of the next timestep."""
        if self.next == 0 or self._needs_redraw or self.uniforms.shape[1] != num_envs:
            self._draw(num_envs)
        timestep = self.next
        self.next = (timestep + 1) % TIMESTEPS_DRAWN
        return self.uniforms[timestep], self.random_actions[timestep]

    def _draw(self, num_envs: int) -> None:
        shape = (TIMESTEPS_DRAWN, num_envs)
        if self.uniforms.shape != shape:
            self.uniforms, self.random_actions = np.zeros(shape), np.zeros(shape, np.int64)
        self._state_before_draw = self._generator.bit_generator.state
        self._generator.random(out=self.uniforms)
        self.random_actions[...] = self._generator.integers(self._drawn_below, size=shape)
        self._needs_redraw = False

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "greedy": self._greedy.state_dict(),
            "generator": self._state_before_draw if self.next else to_plain(self._generator),
            "next": self.next,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = Saved(state, "actor")
        self._greedy.load_state_dict(saved.raw("greedy"))
        set_numpy_generator(self._generator, saved.raw("generator"))
        self._state_before_draw = self._generator.bit_generator.state
        self.next = saved.whole("next", 0, TIMESTEPS_DRAWN - 1)
        self._needs_redraw = True


def _compiled(greedy: Actor) -> tuple[HostNetwork | None, Any]:
    """Return the network in machine code, and the function that acts by it; None without one."""
    if not isinstance(greedy, GreedyActor) or greedy.on_host is None:
        return None, None
    from steadyrl.agents.engine.cpu.network import HostNetwork  # import Numba
    from steadyrl.agents.engine.cpu.policy import epsilon_greedy_actions

    network = greedy.on_host
    return network if isinstance(network, HostNetwork) else None, epsilon_greedy_actions
