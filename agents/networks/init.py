"""Weight initialisation, uniform or orthogonal, from a given generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from steadyrl.agents.networks.noisy import NoisyLinear
from steadyrl.agents.networks.settings import Init
from steadyrl.buffers.memory_layout import HOST

Network = TypeVar("Network", bound=nn.Module)

# What the constructors of layers draw their weights by.
DRAWS = frozenset(
    (
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.kaiming_uniform_,
        Tensor.uniform_,
        Tensor.normal_,
    )
)


def uniform_(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise every layer as U(−1/√fan_in, 1/√fan_in), PyTorch's default, from `generator`."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
            if isinstance(layer, NoisyLinear):
                layer.reset_sigma()
        elif isinstance(layer, nn.LayerNorm | nn.GroupNorm):
            layer.reset_parameters()  # to 1 and 0


def orthogonal_(module: nn.Module, gain: float, generator: torch.Generator) -> None:
    """Initialise every layer of `module` orthogonally with zero biases (Saxe et al. 2014)."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            if isinstance(layer, NoisyLinear):
                layer.reset_sigma()
        elif isinstance(layer, nn.LayerNorm | nn.GroupNorm):
            layer.reset_parameters()  # to 1 and 0


class _WithoutDraws(TorchFunctionMode):
    """Leaves the values of weights as they are where a constructor would draw them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the tensor itself from a draw; call everything else."""
        kwargs = kwargs or {}
        if func in DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Within this block, modules are built on the meta device: without memory and values.

    `materialize` allocates them. Nothing is drawn: before torch 2.11, that imports SymPy (35 MB).
    """
    with torch.device("meta"), _WithoutDraws():
        yield


def materialize(module: Network, device: torch.device) -> Network:
    """Allocate the tensors of a module that was built on the meta device; values are undefined.

    Parameters are views of one flat tensor, as in training: products of weights that begin at
    other addresses may round differently, and an evaluation would not equal the run's own.
    `Module.to_empty` imports SymPy (35 MB).
    """
    parameters = [
        (part, name, weight)
        for part in module.modules()
        for name, weight in list(part.named_parameters(recurse=False))
    ]
    sizes = [weight.numel() for *_, weight in parameters]
    pieces = torch.empty(sum(sizes), device=device).split(sizes)
    for (part, name, weight), piece in zip(parameters, pieces, strict=True):
        setattr(part, name, nn.Parameter(piece.view(weight.shape), weight.requires_grad))
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    return module


def initialise(network: Network, seed: int, init: Init = "auto") -> Network:
    """Allocate a network that was built on the meta device, and draw its weights from `seed`.

    On the host: other devices' generators draw other values.
    """
    reset_parameters = cast(Callable[..., None], materialize(network, HOST).reset_parameters)
    with all_values_set(network):
        reset_parameters(torch.Generator().manual_seed(seed), init)
    return network


@contextmanager
def all_values_set(network: nn.Module) -> Iterator[None]:
    """Raise ValueError if a weight or buffer of an allocated network gets no value in this block.

    What a constructor sets is lost: it ran on the meta device.
    """
    tensors = dict(chain(network.named_parameters(), network.named_buffers()))
    unset = {name: tensor for name, tensor in tensors.items() if tensor.dtype != torch.bool}
    with torch.no_grad():
        for tensor in unset.values():
            tensor.fill_(_unset_value(tensor.dtype))
    yield
    for name, tensor in unset.items():
        if bool((tensor.isnan() | (tensor == _unset_value(tensor.dtype))).any()):
            reason = "networks are built without values, and reset_parameters gives it none"
            raise ValueError(f"{type(network).__name__}: {name} is not initialised: {reason}")


def _unset_value(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
