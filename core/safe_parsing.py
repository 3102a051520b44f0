"""Parsing of untrusted JSON and YAML: size and depth are checked before objects are built.

A short text can expand a lot: `[]` is two bytes, the list it makes takes sixty; YAML aliases of
aliases grow exponentially.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadyrl.core.errors import one_line
from steadyrl.core.files import read_regular

MAX_FILE_BYTES = 4_000_000  # bytes; larger than any file of a run except checkpoints
MAX_VALUES = 200_000
DEEPEST = 40


def from_json(
    text: bytes,
    *,
    most: int = MAX_VALUES,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    """Parse JSON; ValueError if it is invalid, too large or nested too deeply."""
    values = 1 + sum(text.count(mark) for mark in (b"[", b"{", b",", b":"))
    if values > most:
        raise ValueError(f"holds up to {values:,} values, {most:,} are allowed")
    try:
        found = json.loads(text.decode(), parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    _validate_depth(found)
    return found


def _validate_depth(value: Any) -> None:
    layer = [value]
    for _ in range(DEEPEST):
        layer = [
            item
            for each in layer
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
        if not layer:
            return
    raise ValueError("is nested too deeply")


def read_json(path: Path) -> Any:
    """Read JSON from a regular file; OSError or ValueError on failure."""
    return from_json(read_regular(path, MAX_FILE_BYTES))


def read_yaml(path: Path, *, resolve: bool = False, follow: bool = False) -> Any:
    """Read YAML from a regular file; OSError, ValueError or a parser error on failure.

    `resolve` resolves OmegaConf interpolations; without it they are kept as text.
    """
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf

    text = read_regular(path, MAX_FILE_BYTES, follow=follow).decode()
    try:
        _validate_size(text)
    except yaml.YAMLError as error:
        raise ValueError(f"is not valid YAML: {one_line(str(error))}") from None
    try:
        return OmegaConf.to_container(OmegaConf.create(text), resolve=resolve)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _validate_size(text: str) -> None:
    """Raise ValueError if YAML has too many values (aliases expanded) or is nested too deeply."""
    import yaml

    sizes: dict[str, int] = {}
    open_collections: list[tuple[str | None, int]] = []  # anchor, and values before it
    count = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"*{event.anchor} refers to itself or to nothing")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_collections.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.NodeEvent):
            count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_collections.append((event.anchor, count - 1))
            elif event.anchor is not None:
                sizes[event.anchor] = 1
        if count > MAX_VALUES // 10 or len(open_collections) > DEEPEST:
            raise ValueError("has too many values, or is nested too deeply")
