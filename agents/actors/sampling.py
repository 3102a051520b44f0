"""Sample actions from a policy, with noise drawn for a whole rollout at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.actors.greedy import GreedyActor
from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import Head, action_limits
from steadyrl.buffers.memory_layout import HOST, to_device
from steadyrl.core.cuda_graph import CudaGraphed
from steadyrl.core.saved_state import COUNT, Limits, check_limits, tensor

if TYPE_CHECKING:
    from steadyrl.agents.engine.cpu.policy import HostPolicy, PolicyArrays
    from steadyrl.agents.engine.engine import Engine

NOISE = Limits(-110, 110)  # bounds of log E, u and z in float32


def greedy_policy_actor(
    network: ActorCritic,
    head: Head,
    device: torch.device,
    sync_weights: Callable[[], None] | None = None,
    engine: Engine | None = None,
) -> Actor:
    """Return an actor that takes the policy's mode; machine code, where faster, is the engine's."""
    if engine is None:
        from steadyrl.agents.engine.choice import engine_of  # imports Numba

        engine = engine_of("direct")
    on_host = engine.policy(network)
    policy_arrays = None if on_host is None else on_host.policy_arrays(head)
    options: Any = {"sync_weights": sync_weights, "policy_arrays": policy_arrays}
    return GreedyActor(
        network.policy_params, on_host, device, lambda p: head.to_env(head.greedy(p)), **options
    )


class SamplingActor(Actor):
    """Sample actions from the policy, with noise drawn for all timesteps of a rollout at once.

    On a device, one forward pass returns action, log-probability and value (`stores_log_prob`).
    On the host, only actions are computed, and the rest follows for the whole rollout at once.
    During the first rollout (`in_first_rollout`), observations are normalised by statistics that
    include them; `to_store` counts them.
    """

    state_names: ClassVar[tuple[str, ...]] = ("_generator", "noise", "next")
    state_limits: ClassVar[Mapping[str, Limits]] = {"next": COUNT, "noise": NOISE}

    def __init__(
        self,
        network: ActorCritic,
        head: Head,
        on_host: HostPolicy | None,
        *,
        timesteps: int,
        num_envs: int,
        device: torch.device,
        seed: int,
        sync_weights: Callable[[], None] | None = None,
        cuda_graph: bool = False,
    ) -> None:
        self.stores_log_prob = on_host is None
        self._decide: Callable[..., Any] = self._sample_on_device
        if cuda_graph and self.stores_log_prob:
            self._decide = CudaGraphed(self._sample_on_device, "a decision", copies_inputs=True)
        self._network, self._head, self._on_host = network, head, on_host
        self.policy_arrays = None if on_host is None else on_host.policy_arrays(head)
        self._act_on_host: Any = None if self.policy_arrays is None else _compiled_sampling()
        self._sync_weights = sync_weights
        self._device = device if on_host is None else HOST  # where actions are computed
        self.in_first_rollout: Callable[[], bool] = lambda: False
        self._generator = torch.Generator().manual_seed(seed)
        self.noise = torch.zeros((timesteps, num_envs, *head.noise_shape))
        self._device_noise: Any = None  # noise on that device; an array for compiled code
        self._action_dtype = torch.empty(0, dtype=head.action_dtype).numpy().dtype
        self.next = 0

    @property
    def reads_host_weights(self) -> bool:
        """Whether actions come from a copy of the weights on the host."""
        return self._sync_weights is not None

    @property
    @override
    def nbytes(self) -> int:
        return self.noise.nbytes if self._device.type == "cpu" else 2 * self.noise.nbytes

    def act(self, obs: NDArray[Any], episode_starts: NDArray[np.bool_]) -> Decision:
        """Sample actions for observations [N, …]."""
        noise = self._next_noise()
        observed = to_device(obs, self._device)
        self._preview_statistics(observed)
        if self._sync_weights is not None:
            self._sync_weights()
        if self.policy_arrays is not None:
            return self._sample_on_host(self.policy_arrays, obs, observed, noise)
        if self._on_host is not None:
            action = self._head.sample(torch.from_numpy(self._on_host(obs)), noise)
            return Decision(observed, self._head.to_env(action), raw_action=action)
        return Decision(observed, *self._decide(observed, noise))

    @torch.inference_mode()
    def _sample_on_device(
        self, observed: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return environment actions, log-probabilities, values and raw actions [N, …]."""
        parameters, value = self._network(observed)
        action = self._head.sample(parameters, noise)
        log_prob = self._head.log_prob(parameters, action)
        return self._head.to_env(action), log_prob, value, action

    def _preview_statistics(self, observed: Tensor) -> None:
        """In the first rollout, normalise these observations by statistics that include them."""
        normaliser = self._network.normaliser
        if normaliser is not None and self.in_first_rollout():
            normaliser.preview(observed.to(normaliser.frozen_mean.device))

    def _sample_on_host(
        self, policy_arrays: PolicyArrays, obs: NDArray[Any], observed: Tensor, noise: NDArray[Any]
    ) -> Decision:
        n = len(obs)
        # NumPy allocates and reshapes small arrays in less than half of torch's time.
        chosen = np.empty((n, *self._head.action_shape), self._action_dtype)
        sent = np.empty_like(chosen)
        written = chosen.reshape(n, -1), sent.reshape(n, -1)
        self._act_on_host(
            policy_arrays, np.ascontiguousarray(obs).reshape(n, -1), noise.reshape(n, -1), *written
        )
        return Decision(observed, torch.from_numpy(sent), raw_action=torch.from_numpy(chosen))

    def _next_noise(self) -> Any:
        """Return the noise of the next timestep [N, *noise_shape]."""
        if self.next == 0:
            self._head.draw_(self.noise, self._generator)
            self._device_noise = None
        if self._device_noise is None:
            noise = self.noise.numpy()
            in_torch = self.policy_arrays is None
            self._device_noise = to_device(noise, self._device) if in_torch else noise
        noise = self._device_noise[self.next]
        self.next = (self.next + 1) % len(self.noise)
        return noise

    @override
    def check_actions(self, action: Tensor) -> None:
        check_limits(action, action_limits(self._head))

    @override
    def check_decision(self, decision: Decision) -> None:
        head, num_envs = self._head, self.noise.shape[1]
        limits = action_limits(head)
        tensor(decision.raw_action, (num_envs, *head.action_shape), head.action_dtype, limits)
        for numbers in (decision.log_prob, decision.value):
            if numbers is not None:  # an actor on the host gives none
                tensor(numbers, (num_envs,), torch.float32)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._device_noise = None
        if self.next >= len(self.noise):
            raise ValueError(f"next: is {self.next}, it can be 0 to {len(self.noise) - 1}")


def _compiled_sampling() -> Any:
    from steadyrl.agents.engine.cpu.policy import sample_actions  # imports Numba

    return sample_actions
