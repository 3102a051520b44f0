"""The weight matrices between two hidden layers of a network, which Muon trains."""

from __future__ import annotations

from torch import nn


def matrices_after_first(
    network: nn.Module, *trunks: str, kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d)
) -> dict[str, int]:
    """Return the weights of the trunks' layers but their first, by name in `network`.

    The first layers read observations, and heads are not in a trunk. `kinds` of layers have a
    `weight` that is one matrix, a stack of them, or filters: the values say how many lie side by
    side in it, which is 1.
    """
    found: dict[str, int] = {}
    for trunk in trunks:
        parts = network.get_submodule(trunk).named_modules(prefix=trunk)
        names = [f"{name}.weight" for name, part in parts if isinstance(part, kinds)]
        found |= dict.fromkeys(names[1:], 1)
    return found
