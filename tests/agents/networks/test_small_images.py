"""Every image size, from one pixel up, has a trunk that supports it."""

from dataclasses import replace

import pytest
import torch

from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import DiscreteHead
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.networks.settings import NATURE_MIN_SIDE, PLAIN

SIZES = [(h, w) for h in range(1, 13) for w in range(1, 13)]
SIZES += [(h, w) for side in range(13, 49, 3) for h, w in ((side, side), (1, side), (side, 2))]


def networks(shape, dtype):
    yield QNetwork(shape, dtype, 3, (8,), dueling=True)
    for shared in (False, True):
        yield ActorCritic(
            shape,
            dtype,
            DiscreteHead(3),
            hidden=(8,),
            network=replace(PLAIN, activation="tanh"),
            shared=shared,
            normalise=False,
            log_std=0.0,
        )


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_every_image_size_gives_finite_gradients(dtype):
    for height, width in SIZES:
        obs = torch.randint(0, 255, (2, 3, height, width)).to(getattr(torch, dtype))
        for network in networks((3, height, width), dtype):
            out = network(obs)
            loss = sum(part.square().sum() for part in (out if isinstance(out, tuple) else (out,)))
            loss.backward()
            gradients = [p.grad for p in network.parameters()]
            assert all(g is not None and torch.isfinite(g).all() for g in gradients)


def test_boards_and_atari_frames_use_the_published_layers():
    """3x3 on boards (Young & Tian 2019); the Nature layers from the smallest size they take."""
    board = QNetwork((4, 10, 10), "float32", 3, (8,), dueling=False)
    assert board.trunk[0].weight.shape == (16, 4, 3, 3)
    side = NATURE_MIN_SIDE
    frame = QNetwork((4, side, side), "uint8", 3, (8,), dueling=False)
    kernels = [m.kernel_size for m in frame.trunk if isinstance(m, torch.nn.Conv2d)]
    assert kernels == [(8, 8), (4, 4), (3, 3)]
