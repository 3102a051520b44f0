"""Vector environment over any backend: N environments in lockstep, next-step autoreset."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.core.command.typed import command_of
from steadyrl.core.errors import MemoryBudgetError, NonFiniteError
from steadyrl.core.saved_state import Saved, length
from steadyrl.core.state import Stateful, to_plain
from steadyrl.envs.encoding.action_log import ActionLog
from steadyrl.envs.encoding.frame_stack import FrameStack
from steadyrl.envs.encoding.pixel_range import PixelRangeCheck
from steadyrl.envs.encoding.statistics import EpisodeStatistics
from steadyrl.envs.encoding.step_buffer import (
    StepBuffer,
    action_layout,
    backend_kind,
    load_progress,
)
from steadyrl.envs.faults import Faults
from steadyrl.envs.step_clock import StepClock
from steadyrl.envs.types import EnvSpec, Step, StepMany

log = logging.getLogger("steadyrl")

CHECK_EVERY = 1000  # timesteps between two that are checked against Gymnasium's API
INT_DTYPES = ("uint8", "int8", "int16", "int32", "int64")  # dtypes of discrete actions


class Backend(ABC):
    """Runs N environments and writes each step's outcome into a `StepBuffer`.

    Frame stacking, episode statistics and the action log are the vector environment's.
    """

    spec: EnvSpec  # with frame_stack=1
    faults: Faults
    limits: tuple[float, float] | None = None  # as `Encoder.limits`
    supports_replay = False  # each episode has its own seed: repeating its actions restores it
    steps_in_background = False  # a step runs while this process does something else
    # Environments that have responded so far; step timeouts that the next response may take.
    responses, max_timeouts = 0, 1

    def buffers(self) -> tuple[StepBuffer, StepBuffer]:
        """Return the two step buffers, which are filled alternately."""
        return StepBuffer(self.spec, 0), StepBuffer(self.spec, 1)

    @abstractmethod
    def start(self, out: StepBuffer) -> None:
        """Reset every environment and write the first frames into `out`."""

    @abstractmethod
    def step_async(self, action: NDArray[Any], out: StepBuffer) -> None:
        """Start a step with actions [N, …]; its outcome goes into `out`."""

    @abstractmethod
    def step_wait(self, out: StepBuffer) -> None:
        """Wait for the step started last and fill `out`."""

    def handle_non_finite(self, env: int, error: NonFiniteError, out: StepBuffer) -> None:
        """Rebuild an environment that returned NaN or infinity; its step becomes a reset."""
        raise error

    def check_next_step(self) -> None:  # noqa: B027 - batches have no checks
        """Check environment 0's next step against Gymnasium's API, and warn."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return the state of the environments between two steps, as plain values."""

    @abstractmethod
    def restore(
        self, saved: dict[str, Any], past_actions: list[NDArray[Any] | None], out: StepBuffer
    ) -> NDArray[np.bool_]:
        """Restore a snapshot; return which episodes continue [N] (the others reset next step).

        `past_actions` holds the actions of running episodes since their start (None: unknown);
        `out` holds the saved frames, which replayed environments overwrite with their own.
        """

    @abstractmethod
    def force_reset(self, env: int) -> None:
        """Make the next step of an environment a reset."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; may be called twice and after a failure."""


class VectorEnv(Stateful):
    """N environments in lockstep; steps are written alternately into two preallocated buffers."""

    def __init__(
        self, backend: Backend, *, frame_stack: int = 1, check_pixel_range: bool = False
    ) -> None:
        num_envs = backend.spec.num_envs
        self.spec = replace(backend.spec, frame_stack=frame_stack)
        self._backend = backend
        self._faults = backend.faults
        self._buffers = backend.buffers()
        self._slot = 0
        self._stack = FrameStack(self.spec) if frame_stack > 1 else None
        self._statistics = EpisodeStatistics(num_envs, self.spec.info_metrics)
        self._actions = ActionLog(num_envs) if backend.supports_replay else None
        self._pixel_range: PixelRangeCheck | None = None
        if check_pixel_range and backend.limits is not None:
            self._pixel_range = PixelRangeCheck(self.spec, backend.limits)
        self._started = self._awaiting_receive = False
        self.clock = StepClock()

    @property
    def responses(self) -> int:
        """Responses of environments so far; grows during a step unless an environment hangs."""
        return self._backend.responses

    @property
    def max_timeouts(self) -> int:
        """Multiples of `env.step_timeout` that the next response may take."""
        return self._backend.max_timeouts

    def name_steps_by(self, counted: Callable[[], int]) -> None:
        """Let error messages name the step by a run's count of environment steps."""
        self._faults.counted = counted

    @property
    def memory_error(self) -> MemoryBudgetError | None:
        """The error that ends the run: the kernel killed an environment for lack of memory."""
        return self._faults.memory_error

    @property
    def observation(self) -> NDArray[Any]:
        """Current observations [N, …]."""
        return self._buffers[self._slot].obs if self._stack is None else self._stack.current

    @property
    def started(self) -> bool:
        """Whether `reset` has been called."""
        return self._started

    @property
    def episode_starts(self) -> NDArray[np.bool_]:
        """Mask [N] of environments whose next action is the first of an episode."""
        return ~self._buffers[self._slot].valid

    def reset(self) -> NDArray[Any]:
        """Reset every environment and return the first observations [N, …]."""
        self._discard_step()
        out = self._next()
        with self.clock:
            self._backend.start(out)
        self._handle_non_finite(out)
        out.set_all_reset()
        self._statistics.clear()
        if self._actions is not None:
            self._actions.clear()
        self._started = True
        return out.obs if self._stack is None else self._stack.push(out.obs, out.valid)

    def _discard_step(self) -> None:
        """Wait for a step that nobody received: its reply would come as that of another call."""
        if self._awaiting_receive:
            self._awaiting_receive = False
            with self.clock:
                self._backend.step_wait(self._buffers[1 - self._slot])

    def send(self, action: NDArray[Any]) -> None:
        """Start a step with one action per environment; environments that reset ignore theirs."""
        if self._awaiting_receive or not self._started:
            raise RuntimeError("send() needs a reset() before it and one receive() after it")
        self._awaiting_receive = True
        if self._backend.steps_in_background:
            self.clock.begin()
        self._backend.step_async(action, self._buffers[1 - self._slot])
        if self._actions is not None:
            self._log_episode_starts(self._actions)
            self._actions.append(action)

    def receive(self) -> Step:
        """Wait for the step started by `send` and return it."""
        if not self._awaiting_receive:
            raise RuntimeError("receive() needs a send() before it")
        self._awaiting_receive = False
        out = self._next()
        with self.clock:
            self._backend.step_wait(out)
        if not out.is_finite():
            self._handle_non_finite(out)
        self._faults.step += 1
        if not self._faults.step % CHECK_EVERY:
            self._backend.check_next_step()
        self._check_pixels(out)
        episodes = self._statistics.record(out)
        obs = out.obs if self._stack is None else self._stack.push(out.obs, out.valid)
        return Step(obs, out.reward, out.terminated, out.truncated, out.valid, episodes)

    @property
    def runs_blocks(self) -> bool:
        """Whether `step_many` lets compiled code take steps, once actions are sent."""
        return False

    @property
    def step_many(self) -> StepMany | None:
        """Run many steps in one compiled call, the first with the actions sent; None: unsupported.

        Called as `step_many(function, steps, boxed_arguments)`, it calls
        `function(advance, boxed context, boxed_arguments)` (`envs/backends/kernel_block.py`), which
        calls `advance` once per timestep until the context's STOP counter is set: after `steps`
        valid steps or about 20 ms.
        """
        return None

    @property
    def running_episodes(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Returns [N] and lengths [N] of the running episodes so far."""
        returns, begin = self._statistics.running
        return returns.copy(), self._statistics.timesteps - begin

    @property
    def total_reward(self) -> float:
        """The sum of the rewards of all steps received so far, as returns count them."""
        return self._statistics.total_reward

    def step(self, action: NDArray[Any]) -> Step:
        """Send actions [N, …] and receive the step."""
        self.send(action)
        return self.receive()

    def _next(self) -> StepBuffer:
        self._slot = 1 - self._slot
        return self._buffers[self._slot]

    def _handle_non_finite(self, out: StepBuffer) -> None:
        while not out.is_finite():
            name, env, element, value = out.first_non_finite()
            number = f"{self._place(element) if element else 'it'} is {value}"
            self._backend.handle_non_finite(
                env, self._faults.non_finite_error(name, env, number), out
            )

    def _place(self, element: tuple[int, ...]) -> str:
        """Name an element of a frame by its place in the environment's own space, if known."""
        if self.spec.spaces is None or self.spec.mask or len(element) > 1:
            return f"element {list(element)}"
        # Not at the top: a command handles signals before it imports Gymnasium.
        from steadyrl.envs.encoding.description import place_in, read_spaces

        return place_in(read_spaces(self.spec.spaces)[0], *element)

    def _check_pixels(self, out: StepBuffer, timesteps: int = 1) -> None:
        """Check the pixel range of the first images."""
        if self._pixel_range is not None and self._pixel_range.check(out.obs, timesteps):
            self._pixel_range = None

    def _log_episode_starts(self, actions: ActionLog) -> None:
        valid = self._buffers[self._slot].valid
        if np.count_nonzero(valid) < valid.size:
            for env in np.flatnonzero(~valid).tolist():
                actions.begin_episode(env)

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._awaiting_receive:
            raise RuntimeError("state_dict() may be called between receive() and send() only")
        out = self._buffers[self._slot]
        parts: dict[str, Any] = {
            "step": self._faults.step,
            "started": self._started,
            "valid": out.valid,
            "frames": out.obs,
            "stack": None if self._stack is None else self._stack.current,
            "actions": self._past_actions(),
            "statistics": self._statistics,
            "backend": self._backend.snapshot(),
        }
        given: dict[str, Any] = to_plain(parts)
        return given

    def _past_actions(self) -> dict[str, NDArray[Any]]:
        """Return the actions of running episodes by environment, where all of them are logged."""
        if self._actions is None or not self._started:
            return {}
        self._log_episode_starts(self._actions)
        known = ((env, self._actions.episode(env)) for env in range(self.spec.num_envs))
        return {str(env): actions for env, actions in known if actions is not None}

    @override
    def load_state_dict(self, state: Any) -> None:
        self._discard_step()
        given, num_envs = Saved(state, "env"), self.spec.num_envs
        theirs = given.raw("frames")
        if length(theirs) not in (0, num_envs):
            raise ValueError(f"saved from {length(theirs)} environments, here are {num_envs}")
        out = self._buffers[1 - self._slot]
        dtype = self.spec.dtype
        saved = given.tensor("frames", out.obs.shape, dtype).numpy()
        valid = given.tensor("valid", (num_envs,), "bool").numpy()
        past_actions = [self._load_past_actions(given, env) for env in range(num_envs)]
        step, started = given.whole("step"), given.boolean("started")
        stack = None if self._stack is None else self._load_stack(given, saved)
        self._statistics.load_state_dict(given.raw("statistics"))
        if self._statistics.timesteps != step:
            raise ValueError(
                f"env.step: is {step}, its statistics have {self._statistics.timesteps}"
            )
        self._faults.step, self._started = step, started
        self._slot = out.slot
        out.obs[...] = saved
        backend = given.raw("backend")
        self._check_action_counts(past_actions, backend)
        self._check_replayed(self._backend.restore(backend, past_actions, out), past_actions, saved)
        out.set_all_reset()
        out.valid[:] = valid
        out.obs[...] = saved
        if self._stack is not None:
            self._stack.current[...] = stack

    def _load_stack(self, given: Saved, frames: NDArray[Any]) -> NDArray[Any]:
        """Return the saved frame stacks [N, k·C, …], whose newest frames are the saved frames."""
        shape, dtype = (len(frames), *self.spec.observation_shape), self.spec.dtype
        stack: NDArray[Any] = given.tensor("stack", shape, dtype).numpy()
        if given.boolean("started") and not (stack[:, -frames.shape[1] :] == frames).all():
            raise ValueError("env.stack: does not end with env.frames")
        return stack

    def _load_past_actions(self, given: Saved, env: int) -> NDArray[Any] | None:
        """Return the logged actions of an environment's running episode, or None."""
        actions = given.inside("actions")
        if str(env) not in actions:
            return None
        dtype, shape = action_layout(self.spec.action)
        raw = actions.raw(str(env))
        count = length(raw)
        if not count and hasattr(raw, "numpy"):
            return np.zeros((0, *shape), dtype)  # at an episode's start: no shape known yet
        sent = str(getattr(raw, "dtype", "")).removeprefix("torch.")
        if dtype.kind == "i" and sent in INT_DTYPES:  # saved in the dtype the actor sent
            dtype = np.dtype(sent)
        found: NDArray[Any] = actions.tensor(str(env), (count, *shape), dtype.name).numpy()
        return found

    def _check_action_counts(
        self, past_actions: list[NDArray[Any] | None], backend: dict[str, Any]
    ) -> None:
        """Compare the logged actions of each running episode with its length.

        With other actions an episode would be dropped as one that cannot be reproduced.
        """
        logged = backend_kind(Saved(backend, "backend")) == "single"
        if self._actions is None or not logged or not self._started:
            return
        over = load_progress(backend, self.spec.num_envs)[:, 1]
        row_bytes = 8 * self.spec.num_envs * math.prod(action_layout(self.spec.action)[1])
        _, lengths = self.running_episodes
        for env in np.flatnonzero(over == 0).tolist():
            count, actions = int(lengths[env]), past_actions[env]
            if actions is None and count >= self._actions.shortest_dropped(row_bytes):
                continue
            if actions is None or len(actions) != count:
                found = "none" if actions is None else len(actions)
                raise ValueError(f"env.actions.{env}: {found} of the {count} of its episode")

    def _check_replayed(
        self, able: NDArray[np.bool_], past_actions: list[NDArray[Any] | None], saved: NDArray[Any]
    ) -> None:
        """Force a reset where replaying did not reproduce the saved frames [N, …]."""
        frames = self._buffers[self._slot].obs
        same = (frames == saved).reshape(len(saved), -1).all(axis=1)
        for env in np.flatnonzero(able & ~same).tolist():
            self._backend.force_reset(env)
        lost = np.flatnonzero(~(able & same)).tolist()
        self._statistics.drop(lost)
        if self._actions is not None:
            self._actions.load(
                [None if env in lost else past_actions[env] for env in range(len(past_actions))]
            )
        if lost and self._started:
            check = f"{command_of('envs')} check {self.spec.id}"
            who = "all environments"
            if len(lost) < len(past_actions):
                who = f"environment {', '.join(map(str, lost))}"
            differs = f"; with its seed and actions an episode came out differently ({check})"
            log.warning(
                "episodes of %s cannot be continued: the next step starts new ones%s",
                who,
                differs if (able & ~same).any() else "",
            )

    def close(self) -> None:
        """Release all resources; may be called twice and after a failure."""
        with self.clock:
            self._backend.close()

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
