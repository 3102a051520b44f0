"""Types and checks of the `agent.network.*` keys; importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from steadyrl.core.errors import WIDEST_LAYER, SettingError
from steadyrl.envs.types import DiscreteActions, EnvSpec, MultiDiscreteActions

Activation = Literal["relu", "tanh", "elu", "silu"]
EncoderName = Literal["mlp", "nature", "impala", "minatar", "der"]
Init = Literal["auto", "orthogonal", "uniform"]

# Below this side length the Nature layers' strides leave nothing of the image.
NATURE_MIN_SIDE = 36
LARGE = ("nature", "der")  # encoders of large images only


def is_large_image(observation_shape: Sequence[int]) -> bool:
    """Return whether observations are images that the Nature layers take."""
    return len(observation_shape) == 3 and min(observation_shape[1:]) >= NATURE_MIN_SIDE


def fitting(observation_shape: Sequence[int]) -> tuple[EncoderName, ...]:
    """Return the encoders that take such observations."""
    if len(observation_shape) != 3:
        return ("mlp",)
    large = is_large_image(observation_shape)
    return tuple(name for name in get_args(EncoderName) if large or name not in LARGE)


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The encoder of observations, the layers of `agent.hidden` after it, and how both start."""

    encoder: Literal["auto"] | EncoderName
    activation: Activation
    layer_norm: bool
    init: Init

    def encoder_for(self, observation_shape: Sequence[int]) -> EncoderName:
        """Return the encoder for such observations."""
        if self.encoder != "auto":
            return self.encoder
        if len(observation_shape) != 3:
            return "mlp"
        return "nature" if is_large_image(observation_shape) else "minatar"

    def validate_fit(self, spec: EnvSpec) -> None:
        """Refuse more actions than a layer has outputs, and encoders that do not fit."""
        _validate_actions(spec)
        shape = spec.unmasked_shape
        if self.encoder == "auto" or self.encoder in fitting(shape):
            return
        size = "x".join(str(side) for side in shape)
        seen = f"images of {size}" if len(shape) == 3 else f"vectors of {size}"
        needs = f"images of {NATURE_MIN_SIDE}x{NATURE_MIN_SIDE} or more"
        raise SettingError(
            "agent.network.encoder",
            self.encoder,
            f"needs {needs if self.encoder in LARGE else 'images'}, but {spec.id} is observed "
            f"as {seen}, which fit {', '.join(sorted(fitting(shape)))}",
        )


def _validate_actions(spec: EnvSpec) -> None:
    """Refuse more actions than a network can have outputs for."""
    if isinstance(spec.action, DiscreteActions):
        outputs = spec.action.n
    elif isinstance(spec.action, MultiDiscreteActions):
        outputs = sum(spec.action.nvec)
    else:
        return
    if outputs > WIDEST_LAYER:
        reason = (
            f"has {outputs:,} discrete actions, and a network has an output for each: at most "
            f"{WIDEST_LAYER:,} can be learned. Give it fewer with a wrapper (env.wrappers), or a "
            "MultiDiscrete or Box action space, for agent=ppo"
        )
        raise SettingError("env.id", spec.id, reason)


# The choice of algorithms that have no such keys.
PLAIN = NetworkSettings(encoder="auto", activation="relu", layer_norm=False, init="auto")
