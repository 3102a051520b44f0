"""Augmentation of replay samples: images shifted at random (DrQ, Kostrikov et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.dqn.build import DQNParts
from steadyrl.agents.dqn.noise import update_seed
from steadyrl.agents.dqn.q_heads import Q
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.buffers.memory_layout import send
from steadyrl.envs.types import EnvSpec

PAD = 4  # pixels, at most, in each direction


def shift(images: Tensor, offsets: Tensor) -> Tensor:
    """Return images [B, C, H, W] moved by `offsets` [B, 2] pixels, with repeated borders.

    The same as padding by replication and cropping at PAD + offset.
    """
    height, width = images.shape[2:]
    down, right = offsets.unsqueeze(2).unbind(1)  # [B, 1] each
    rows = (torch.arange(height, device=images.device) + down).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + right).clamp(0, width - 1)
    # One gather of flat images takes a third of the time of two, by row and by column.
    index = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).flatten(1).unsqueeze(1)
    flat = images.flatten(2)
    return flat.gather(2, index.expand_as(flat)).view_as(images)


def shift_features(obs: Tensor, offsets: Tensor, masks: Masks | None) -> Tensor:
    """Return observations whose images are shifted; the masks in their last rows stay in place."""
    if masks is None:
        return shift(obs, offsets)
    return masks.replace_features(shift(masks.features(obs), offsets), obs)


def shifted_loss(
    online: Q,
    target: Q,
    batch: Any,
    *scalars: float | Tensor,
    loss: Callable[..., PerSampleLoss],
    masks: Masks | None,
) -> PerSampleLoss:
    """Return `loss` of a batch whose observations s and s' are shifted by offsets of their own."""
    obs, next_obs = (
        shift_features(each, offsets, masks)
        for each, offsets in zip((batch.obs, batch.next_obs), batch.shift.unbind(1), strict=True)
    )
    return loss(online, target, batch._replace(obs=obs, next_obs=next_obs), *scalars)


class RandomShift(Extension):
    """Shift the images of each update's sample by new offsets; every rank draws its own."""

    _learner: Learner

    def __init__(
        self,
        settings: DQNSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
    ) -> None:
        del settings, total_steps
        self._generator, self._device = torch.Generator(), device
        self._masks = Masks.of(spec, device)
        # A stream of its own.
        [self._seed] = np.random.SeedSequence([seed, 3]).generate_state(1).tolist()

    @override
    def loss_spec(self, spec: LossSpec) -> LossSpec:
        return replace(spec, loss=partial(shifted_loss, loss=spec.loss, masks=self._masks))

    @override
    def attach(self, parts: DQNParts) -> None:
        self._learner = parts.learner

    @override
    def replay_fields(self, batch: Any) -> Mapping[str, Tensor]:
        self._generator.manual_seed(update_seed(self._seed, self._learner.updates))
        offsets = torch.randint(-PAD, PAD + 1, (len(batch.obs), 2, 2), generator=self._generator)
        return {"shift": send(self._device, offsets.numpy())[0]}
