"""Interface types of environments: step, episode, action and observation spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from steadyrl.core.errors import ExpectedError
from steadyrl.envs.settings import EnvSettings


class EnvironmentFailedError(ExpectedError):
    """An environment failed and cannot be rebuilt: which one, at which step, and why."""

    exit_code = 4


class Episode(NamedTuple):
    """A finished episode: raw, undiscounted return and length in valid steps."""

    env: int
    return_: float
    length: int
    info: Mapping[str, float] = MappingProxyType({})  # the values of `env.info_metrics`


class Step(NamedTuple):
    """One timestep of all N environments.

    `obs` is the next observation to act on and, for every valid step, the true successor (also at
    the end of an episode). Where `valid` is False the environment was reset: never learn from it.
    The arrays are overwritten by the second step after this one.
    """

    obs: NDArray[Any]  # [N, *observation_shape]
    reward: NDArray[np.float32]  # [N]
    terminated: NDArray[np.bool_]  # [N]
    truncated: NDArray[np.bool_]  # [N]
    valid: NDArray[np.bool_]  # [N]
    episodes: tuple[Episode, ...]


@dataclass(frozen=True)
class DiscreteActions:
    """One of n actions."""

    n: int


@dataclass(frozen=True)
class MultiDiscreteActions:
    """Several independent discrete actions."""

    nvec: tuple[int, ...]


@dataclass(frozen=True)
class MultiBinaryActions:
    """n independent binary actions."""

    n: int


@dataclass(frozen=True)
class BoxActions:
    """A bounded vector; the environment clips actions to the bounds."""

    low: tuple[float, ...]
    high: tuple[float, ...]


ActionSpec = DiscreteActions | MultiDiscreteActions | MultiBinaryActions | BoxActions

# Action mask bits that one element of an observation holds exactly.
MASK_BITS = {"float32": 24, "uint8": 8}


class Encoder(NamedTuple):
    """Converts observations to frames: shape and dtype of a frame, and the function that writes it.

    `write(observation, frame)` encodes one observation, `write(observations, frames, (N,))` a batch
    of N as Gymnasium batches them, with the same result.
    """

    shape: tuple[int, ...]
    dtype: str  # "float32" or "uint8"
    write: Callable[..., None]
    remark: str = ""  # warning to log once
    mask: int = 0  # as `EnvSpec.mask`
    # The values that bytes 0 and 255 of an image, or 0 and 1 of a vector of bytes, encode, if all
    # elements have the same range.
    limits: tuple[float, float] | None = None
    one_hot: bool = False  # as `EnvSpec.one_hot`


@dataclass(frozen=True)
class EnvSpec:
    """Shapes and dtypes after encoding: float32 vectors, or channels-first uint8 images.

    Environments return one frame per step; an observation is the last `frame_stack` frames,
    concatenated along the first axis, oldest first. The action mask is packed into bits at a
    frame's end: `mask` elements of a vector, or rows of an image (`envs/encoding/masks.py`).
    Parts of a Dict or Tuple lie in a vector in the order of `spaces["observation"]["parts"]`, which
    is that of `gymnasium.spaces.flatten`; `spaces` is None in some backends and where a saved
    policy is built, so that an agent which needs their places takes them from its settings.
    """

    id: str
    num_envs: int
    frame_shape: tuple[int, ...]
    dtype: str  # "float32" or "uint8"
    frame_stack: int
    action: ActionSpec
    info_metrics: tuple[str, ...] = ()  # `info` values reported with finished episodes
    mask: int = 0  # elements or image rows of a frame that hold the mask; 0: no action mask
    one_hot: bool = False  # frames are vectors of 0 and 1, encoded from discrete observations
    # The environment's own spaces (`envs/encoding/description.py`), where they were looked at.
    spaces: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, settings: EnvSettings, encoder: Encoder, action: ActionSpec) -> EnvSpec:
        """Return the spec of environments without frame stacking."""
        shape, dtype, n, mask = encoder.shape, encoder.dtype, settings.num_envs, encoder.mask
        names, one_hot = tuple(settings.info_metrics), encoder.one_hot
        return cls(settings.id, n, shape, dtype, 1, action, names, mask, one_hot)

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of an observation, action mask included."""
        return (self.frame_stack * self.frame_shape[0], *self.frame_shape[1:])

    @property
    def unmasked(self) -> EnvSpec:
        """The same spec without action masks."""
        first, *rest = self.frame_shape
        if rest:
            rest[0] -= self.mask
        else:
            first -= self.mask
        return replace(self, frame_shape=(first, *rest), mask=0)

    @property
    def unmasked_shape(self) -> tuple[int, ...]:
        """Shape of an observation without its action mask: the network's input."""
        return self.unmasked.observation_shape

    def validate_same(self, purpose: str, found: EnvSpec) -> None:
        """Raise EnvironmentFailedError if rebuilt environments have other spaces."""
        for part in ("frame_shape", "dtype", "action", "mask"):
            now, before = getattr(found, part), getattr(self, part)
            if now != before:
                raise EnvironmentFailedError(
                    f"{self.id}: its {part.replace('_', ' ')} for {purpose} is {now}, but it was"
                    f" {before}: it differs each time it is built"
                )


def plain_spec(spec: EnvSpec) -> dict[str, Any]:
    """Return an EnvSpec as plain JSON values."""
    plain = asdict(replace(spec, spaces=None))
    del plain["spaces"]  # they describe the environment, not what the network gets
    plain["action"] = {"kind": type(spec.action).__name__, **plain["action"]}
    for name in ("mask", "one_hot"):  # absent where there are none
        if not plain[name]:
            del plain[name]
    return _listed(plain)  # type: ignore[no-any-return]


def _listed(value: Any) -> Any:
    """Return lists for tuples, as JSON has them."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return value


def spec_of(plain: Mapping[str, Any]) -> EnvSpec:
    """Rebuild an EnvSpec from `plain_spec`'s values."""
    values = dict(plain)
    action = {k: tuple(v) if isinstance(v, list) else v for k, v in values.pop("action").items()}
    kinds: dict[Any, Any] = {kind.__name__: kind for kind in get_args(ActionSpec)}
    kind = kinds[action.pop("kind")]
    values["frame_shape"] = tuple(values["frame_shape"])
    values["info_metrics"] = tuple(values.get("info_metrics", ()))
    return EnvSpec(**values, action=kind(**action))


class BlockResult(NamedTuple):
    """Outcome of many timesteps: valid steps, and finished episodes with the step they ended at."""

    steps: int
    episodes: tuple[tuple[int, Episode], ...]


# Gets an environment's observation, its space and the environment's index, or the observations of
# all N as one batch, the space of one and None.
Watch = Callable[[Any, Any, int | None], None]
# The type of `VectorEnv.step_many`.
StepMany = Callable[[Callable[..., None], int, Any], BlockResult]
# First entries of the block context's counters: which of the two observation arrays is current,
# which of the two step buffers is current, stop after this timestep, stop because of NaN/infinity.
OBS_SLOT, STEP_SLOT, STOP, NON_FINITE = range(4)
