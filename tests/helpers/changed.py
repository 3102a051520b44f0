"""Copies of settings with some keys changed, nested ones too."""

from dataclasses import replace


def changed(settings, **changes):
    """Return settings with changes; `noisy__sigma=0.1` sets `noisy.sigma`."""
    plain, blocks = {}, {}
    for key, value in changes.items():
        block, _, name = key.partition("__")
        if name:
            blocks.setdefault(block, {})[name] = value
        else:
            plain[key] = value
    inside = {block: changed(getattr(settings, block), **those) for block, those in blocks.items()}
    return replace(settings, **plain, **inside)
