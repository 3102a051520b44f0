"""Range checks shared by the settings of all agents."""

from __future__ import annotations

from memory.errors import SettingError

WIDEST = 1_000_000


def positive(settings: object, *names: str) -> None:
    """Refuse fields that are not above 0."""
    for name in names:
        value = getattr(settings, name)
        if not value > 0:
            raise SettingError(name, value, "must be above 0")


def zero_or_more(settings: object, *names: str) -> None:
    """Refuse fields that are below 0."""
    for name in names:
        value = getattr(settings, name)
        if not value >= 0:
            raise SettingError(name, value, "must be 0 or more")


def at_most(settings: object, limit: float, *names: str) -> None:
    """Refuse fields beyond what arithmetic in float32, or patience, can do anything with."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value > limit:
            raise SettingError(name, value, f"must be at most {limit:,g}")


def fraction(settings: object, *names: str) -> None:
    """Refuse fields outside [0, 1]."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value <= 1:
            raise SettingError(name, value, "must be between 0 and 1")


def hidden_layers(sizes: tuple[int, ...]) -> None:
    """Refuse an empty network or a layer without units."""
    if not sizes:
        raise SettingError("hidden", list(sizes), "needs at least one layer, such as [64,64]")
    if min(sizes) <= 0:
        raise SettingError("hidden", list(sizes), "layer sizes must be above 0")
    if max(sizes) > WIDEST:
        raise SettingError("hidden", list(sizes), f"layer sizes must be at most {WIDEST:,}")
