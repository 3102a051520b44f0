"""Values as overrides have them, which Hydra and YAML read alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Text that needs no quotes, unless it is one of the words of YAML and Hydra's grammar.
PLAIN = re.compile(r"/?[A-Za-z_][\w./-]*(:[\w./-]+)*", re.ASCII)
WORDS = ("true", "false", "null", "nan", "inf", "yes", "no", "on", "off")


def literal(value: Any) -> str:
    """Return a value as an override has it, in full."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, str):
        words = value.split(" ")  # between which spaces are read as they are
        plain = all(PLAIN.fullmatch(word) and word.lower() not in WORDS for word in words)
        return value if plain else in_quotes(value)
    return "null" if value is None else repr(value).lower()  # true, 1e-05, inf


def in_quotes(text: str) -> str:
    """Return a text in double quotes, where a backslash escapes only before a quote."""

    def escape(found: re.Match[str]) -> str:
        return 2 * found[1] + found[2].replace('"', '\\"')

    return '"' + re.sub(r'(\\*)("|\Z)', escape, text) + '"'
