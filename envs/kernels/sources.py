"""Hashes of the original environments' source files that kernels are verified against.

A new release may change an environment. A kernel is used only if the installed files have one of
these hashes, whose steps were compared with the kernel's by `tests/envs/kernels/test_kernels.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

DIGITS = 16  # hexadecimal digits of a hash
# Gymnasium 1.3.0 and 1.4.0 (which differ in rendering only) and MinAtar 1.0.15.
KNOWN: dict[str, tuple[str, ...]] = {
    "gymnasium.envs.classic_control.cartpole": ("ebc780f261233490", "8c034275500ff9c6"),
    "gymnasium.envs.classic_control.acrobot": ("81ac9d2a2f7866ac", "4ea2699f41516c61"),
    "gymnasium.envs.classic_control.mountain_car": ("5465a274e5ea348d", "37ab120a8e931da6"),
    "gymnasium.envs.classic_control.continuous_mountain_car": (
        "63edd6c0e1876977",
        "3ad16d3f27bfb867",
    ),
    "gymnasium.envs.classic_control.pendulum": ("01d7006351060606", "f349a2160b54fce7"),
    "gymnasium.envs.toy_text.frozen_lake": ("5769d6ed89fe0aba", "d640d8289c7046eb"),
    "gymnasium.envs.toy_text.cliffwalking": ("f632b94f8ad1a950", "24f48ac450a39935"),
    "gymnasium.envs.toy_text.taxi": ("82074dd93e1f8198", "63c51638c652f31b"),
    "gymnasium.envs.toy_text.utils": ("3739667fe0ded696",),
    "minatar.environment": ("b2dbb5e63bc6f7f8",),
    "minatar.gym": ("0b3a9c5ba484e665",),
    "minatar.environments.asterix": ("ce6a4a854bbf6104",),
    "minatar.environments.breakout": ("35fd842751f4314a",),
    "minatar.environments.freeway": ("809243630624c429",),
    "minatar.environments.seaquest": ("79b28b9798c520dc",),
    "minatar.environments.space_invaders": ("1accccac909db675",),
    "gymnasium.utils.seeding": ("eb2a223b92604b7d",),
}


def changed_module(modules: Iterable[str]) -> str | None:
    """Return the first of these modules whose file has an unknown hash; None: all are known."""
    return next((name for name in modules if hash_of(name) not in KNOWN[name]), None)


def hash_of(module: str) -> str | None:
    """Return the hash of a module's source file without importing it; None: no source file."""
    source = source_of(module)
    try:
        return None if source is None else sha256(source.read_bytes()).hexdigest()[:DIGITS]
    except OSError:  # bytecode only, or inside an archive
        return None


def source_of(module: str) -> Path | None:
    """Return the expected path of a module's source file."""
    package, *inside = module.split(".")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0], *inside).with_suffix(".py")
