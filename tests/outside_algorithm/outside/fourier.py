"""PPO on Fourier features (Tancik et al. 2020) of the observation."""

from functools import partial

import torch
from torch import nn

from steadyrl.agents.networks.actor_critic import ActorCritic, SharedTrunk
from steadyrl.agents.networks.encoders import MLP
from steadyrl.agents.ppo.agent import PPO
from steadyrl.agents.ppo.policy import build_network


class FourierFeatures(nn.Module):
    """Sines and cosines of random projections, beside the observation itself."""

    def __init__(self, inputs, frequencies):
        super().__init__()
        self.register_buffer("projections", torch.empty(inputs, frequencies))
        self.features = inputs + 2 * frequencies

    def forward(self, x):
        """Return features [B, F + 2K] of observations [B, F]."""
        angles = x @ self.projections
        return torch.cat((x, angles.sin(), angles.cos()), 1)


class FourierActorCritic(ActorCritic):
    """An actor-critic with one trunk, which begins with Fourier features."""

    def __init__(self, observation_shape, dtype, head, *, frequencies, **options):
        super().__init__(observation_shape, dtype, head, **options | {"shared": True})
        fourier, network = FourierFeatures(*observation_shape, frequencies), options["network"]
        norm = {"layer_norm": network.layer_norm}
        mlp = MLP(fourier.features, options["hidden"], network.activation, **norm)
        self.trunk = SharedTrunk(nn.Sequential(fourier, mlp))

    def reset_parameters(self, generator, init="auto"):
        """Draw the projections, too: what a constructor sets is lost."""
        super().reset_parameters(generator, init)
        self.trunk.both[0].projections.normal_(generator=generator)


class FourierPPO(PPO):
    """PPO with this network."""

    @staticmethod
    def build_network(settings, spec, head, device):
        """Build the network on the meta device."""
        kind = partial(FourierActorCritic, frequencies=settings.frequencies)
        return build_network(settings, spec, head, device, kind)
