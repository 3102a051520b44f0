"""Those who decide: ε-greedily, by noise, by sampling, or greedily, by the weights of this moment.

Each reads a network that somebody else may be changing, and owns what it draws with. Small dense
networks act as machine code on the host (`agents/host_network.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from agents.actor_critic import ActorCritic
from agents.base import Actor, Decision
from agents.greedy_stretch import Chooser
from agents.heads import Head
from agents.host_network import Floats, HostNetwork
from agents.host_policy import Drawing, HostPolicy, draw, explore, policy_on_host
from agents.masking import RANKS, Masks
from agents.noisy import draw_noise
from buffers.arrays import send
from memory.recording import Recorded
from memory.saved import COUNT, Limits, Saved, set_numpy_generator
from memory.state import give

Observations = NDArray[Any]  # [N, …]
HOST = torch.device("cpu")
NOISE = Limits(-110, 110)  # log E, u and z of float32 are all nearer to 0
ROWS_DRAWN = 256  # coins are drawn for so many rows at once


def on_device(obs: Observations, device: torch.device) -> Tensor:
    """Return observations where the network is."""
    return torch.from_numpy(obs) if device.type == "cpu" else send(device, obs)[0]


def as_rows(obs: Observations) -> Floats:
    """Return observations as compiled code reads them [N, D]."""
    return np.ascontiguousarray(obs, np.float32).reshape(len(obs), -1)


class Greedy(Actor):
    """Takes the best action, by what the network puts out; draws nothing and changes nothing.

    The outputs come from `on_host` where there is one, else from the network on its device. What
    reads a copy of the weights says how to `refresh` it. Machine code may take the next actions too
    (`going_on`), where it can.
    """

    def __init__(
        self,
        network: Callable[..., Tensor],
        on_host: Callable[[Observations], Floats] | None,
        device: torch.device,
        choose: Callable[[Tensor], Tensor],
        refresh: Callable[[], None] | None = None,
        recorded: bool = False,
        drawing: Drawing | None = None,
    ) -> None:
        plays = recorded and on_host is None
        how: Any = Recorded(self.decide, "a decision", copies=True) if plays else self.decide
        self._decide: Callable[..., Any] = how
        self.going_on = None if drawing is None else Chooser(drawing)
        self._network, self.on_host, self.device = network, on_host, device
        self.refresh = refresh
        self._choose = choose  # actions [N, …] by outputs [N, …]

    def act(self, obs: Observations, starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        if self.on_host is not None:
            if self.refresh is not None:
                self.refresh()
            action = self._choose(torch.from_numpy(self.on_host(obs)))
            return Decision(torch.from_numpy(obs), action)
        observed = on_device(obs, self.device)
        with torch.inference_mode():
            return Decision(observed, self._decide(observed))

    def decide(self, *inputs: Tensor) -> Tensor:
        """Return the best actions [N, …] for the network's inputs, observations [N, …] first."""
        return self._choose(self._network(*inputs))


def most_likely(
    network: ActorCritic,
    head: Head,
    device: torch.device,
    refresh: Callable[[], None] | None = None,
) -> Actor:
    """Return an actor that takes the most likely actions."""
    on_host = policy_on_host(network)
    drawing = None if on_host is None else on_host.drawing(head)
    options: Any = {"refresh": refresh, "drawing": drawing}
    return Greedy(network.deciding, on_host, device, lambda p: head.sent(head.greedy(p)), **options)


class EpsilonGreedy(Actor):
    """Takes a random action with probability ε, one coin per environment, else the best one."""

    def __init__(
        self,
        greedy: Greedy,
        *,
        actions: int,
        epsilon: Callable[[], float],
        seed: int,
        masks: Masks | None = None,
    ) -> None:
        self._greedy, self._masks = greedy, masks
        network = greedy.on_host
        self.on_host = network if isinstance(network, HostNetwork) else None
        self.mirrored = greedy.refresh is not None  # by a copy of the weights
        self._epsilon = epsilon
        self._actions = actions if masks is None else RANKS  # of which any number are allowed
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._before = self._generator.bit_generator.state  # what was drawn was drawn from there
        self.coins = np.zeros((ROWS_DRAWN, 0))
        self.choices = np.zeros((ROWS_DRAWN, 0), np.int64)
        self.next = 0
        self._stale = False  # the rest is to be drawn anew

    def act(self, obs: Observations, starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        coins, choices = self._row(len(obs))
        if self.on_host is not None:
            if self._greedy.refresh is not None:
                self._greedy.refresh()
            action = np.empty((len(obs), 1), np.int64)
            drawn = coins, choices, self._epsilon()
            explore(self.on_host.plan, self.on_host.activation, as_rows(obs), *drawn, action)
            return Decision(torch.from_numpy(obs), torch.from_numpy(action[:, 0]))
        random = coins < self._epsilon()
        best = self._greedy.act(obs, starts)
        if self._masks is not None and random.any():
            choices = self._masks.pick(choices, obs)
        chosen = np.where(random, choices, best.action.numpy(force=True))
        return best._replace(action=torch.from_numpy(chosen))

    def _row(self, num_envs: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the next row of coins and choices [N]."""
        if self.next == 0 or self._stale or self.coins.shape[1] != num_envs:
            self._draw(num_envs)
        row = self.next
        self.next = (row + 1) % ROWS_DRAWN
        return self.coins[row], self.choices[row]

    def _draw(self, num_envs: int) -> None:
        shape = (ROWS_DRAWN, num_envs)
        if self.coins.shape != shape:
            self.coins, self.choices = np.zeros(shape), np.zeros(shape, np.int64)
        self._before = self._generator.bit_generator.state
        self._generator.random(out=self.coins)
        self.choices[...] = self._generator.integers(self._actions, size=shape)
        self._stale = False

    @override
    def state_dict(self) -> dict[str, Any]:
        # What is drawn is drawn again from there.
        return {
            "generator": self._before if self.next else give(self._generator),
            "next": self.next,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_numpy_generator(self._generator, Saved(state, "actor").raw("generator"))
        self.next, self._stale = Saved(state, "actor").whole("next", 0, ROWS_DRAWN - 1), True


class Perturbed(Actor):
    """Takes the best action by noisy weights, drawn anew for every row and environment."""

    state_names = ("_generator",)

    def __init__(self, greedy: Greedy, *, noise_size: int, seed: int) -> None:
        self._greedy, self._noise_size = greedy, noise_size
        self._generator = torch.Generator().manual_seed(seed)

    def act(self, obs: Observations, starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        drawn = draw_noise(len(obs), self._noise_size, self._generator)
        device = self._greedy.device
        at_home = device.type == "cpu"
        there = (torch.from_numpy(obs), drawn) if at_home else send(device, obs, drawn.numpy())
        observed, noise = there
        with torch.inference_mode():
            return Decision(observed, self._greedy.decide(observed, noise).cpu())


class Sampling(Actor):
    """Draws actions from the policy, with noise drawn for all rows of a rollout at once.

    On a device one forward pass gives action, log-probability and value: it is `complete`. On the
    host it gives the action alone, and the rest follows for all rows at once. While the network
    is `fresh`, what is acted on counts in its statistics of observations.
    """

    state_names: ClassVar[tuple[str, ...]] = ("_generator", "noise", "next")
    state_limits: ClassVar[Mapping[str, Limits]] = {"next": COUNT, "noise": NOISE}

    def __init__(
        self,
        network: ActorCritic,
        head: Head,
        on_host: HostPolicy | None,
        *,
        rows: int,
        num_envs: int,
        device: torch.device,
        seed: int,
        fresh: Callable[[], bool] = lambda: False,
        refresh: Callable[[], None] | None = None,
        recorded: bool = False,
    ) -> None:
        self.complete = on_host is None
        plays = recorded and self.complete
        how: Any = Recorded(self._decided, "a decision", copies=True) if plays else self._decided
        self._decide: Callable[..., Any] = how
        self._network, self._head, self._on_host = network, head, on_host
        self.drawing = None if on_host is None else on_host.drawing(head)
        self._refresh = refresh
        self._device = device if on_host is None else HOST  # where it decides
        self.fresh = fresh
        self._generator = torch.Generator().manual_seed(seed)
        self.noise = torch.zeros((rows, num_envs, *head.noise_shape))
        self._there: Any = None  # the noise where it decides; as an array for machine code
        self._action_dtype = torch.empty(0, dtype=head.action_dtype).numpy().dtype
        self.next = 0

    @property
    def mirrored(self) -> bool:
        """Whether it reads a copy of the weights."""
        return self._refresh is not None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.noise.nbytes if self._device.type == "cpu" else 2 * self.noise.nbytes

    def act(self, obs: Observations, starts: NDArray[np.bool_]) -> Decision:
        """Decide for observations [N, …]."""
        noise = self._row()
        observed = on_device(obs, self._device)
        self._look(observed)
        if self._refresh is not None:
            self._refresh()
        if self.drawing is not None:
            return self._drawn(self.drawing, obs, observed, noise)
        if self._on_host is not None:
            action = self._head.sample(torch.from_numpy(self._on_host(obs)), noise)
            return Decision(observed, self._head.sent(action), chosen=action)
        return Decision(observed, *self._decide(observed, noise))

    @torch.inference_mode()
    def _decided(self, observed: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what is sent, how likely it is, the values, and the actions [N, …]."""
        parameters, value = self._network(observed)
        action = self._head.sample(parameters, noise)
        log_prob = self._head.log_prob(parameters, action)
        return self._head.sent(action), log_prob, value, action

    def _look(self, observed: Tensor) -> None:
        """Let what is acted on count in the statistics of observations, while they are fresh."""
        normaliser = self._network.normaliser
        if normaliser is not None and self.fresh():
            normaliser.look(observed.to(normaliser.shift.device))

    def _drawn(
        self, drawing: Drawing, obs: Observations, observed: Tensor, noise: NDArray[Any]
    ) -> Decision:
        n = len(obs)
        # By NumPy, which makes and reshapes what is small in less than half of torch's time.
        chosen = np.empty((n, *self._head.action_shape), self._action_dtype)
        sent = np.empty_like(chosen)
        written = chosen.reshape(n, -1), sent.reshape(n, -1)
        draw(drawing, np.ascontiguousarray(obs).reshape(n, -1), noise.reshape(n, -1), *written)
        return Decision(observed, torch.from_numpy(sent), chosen=torch.from_numpy(chosen))

    def _row(self) -> Any:
        """Return the next row of noise [N, *noise_shape]."""
        if self.next == 0:
            self._head.draw_(self.noise, self._generator)
            self._there = None
        if self._there is None:
            noise = self.noise.numpy()
            self._there = on_device(noise, self._device) if self.drawing is None else noise
        row = self._there[self.next]
        self.next = (self.next + 1) % len(self.noise)
        return row

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._there = None
        if self.next >= len(self.noise):
            raise ValueError(f"next: is {self.next}, it can be 0 to {len(self.noise) - 1}")
