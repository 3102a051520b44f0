"""Overrides that Hydra's grammar cannot read: how to write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from steadyrl.training.config.overrides import escape_colons

SIMPLE = re.compile(r"[A-Za-z_][\w.]*=[^\s='\"]+", re.ASCII)  # an override without spaces

# An override with spaces around its =, which the shell may have cut there.
SPACED = re.compile(r"([+~]*[A-Za-z_][\w./@]*)(?: +=| *= )\s*([^\s=]+)", re.ASCII)

PLAIN_VALUE = re.compile(r"[\w.,:/+\-\[\]{}()$*%@?|\\]*", re.ASCII)


def explain_syntax(overrides: Sequence[str], place: int) -> str:
    """Return the line for the override at `place`, which cannot be read."""
    typed = [text.removeprefix("++").replace("\\:", ":") for text in overrides]  # as typed
    return _explain_spaces(typed, place) or _explain_word(typed[place])


def _explain_spaces(typed: Sequence[str], place: int) -> str | None:
    """Explain an override with spaces around its =: in one word, or cut there."""
    for first in range(max(0, place - 1), place + 1):
        for end in range(place + 1, first + 4):
            spaced = SPACED.fullmatch(" ".join(typed[first:end]))
            if spaced:
                return f"{spaced[0]}: write {spaced[1]}={spaced[2]}, without spaces around ="
    return None


def _explain_word(text: str) -> str:
    key, equals, value = text.partition("=")
    mapping = _as_mapping(value)
    if mapping != value and _is_readable(f"{key}={mapping}"):
        return f"{text}: a mapping has colons, and keys without quotes: '{key}={mapping}'"
    pair = re.fullmatch(r"([\w.]+): *(\S+)", text)
    if pair:
        return f"{text}: cannot be read; write {pair[1]}={pair[2]}"
    if value.startswith("[") and "]" not in value:
        return f"{text}: the shell ends it at the space; quote it, or leave spaces out: {key}=[…,…]"
    if " " in key:
        instead = f"{key.split()[-1].lstrip('/')}={value.strip() or '…'}"
        return f"{text}: {key!r} is no key: write {instead}"
    if not equals or not key:
        return f"{text}: cannot be read; overrides look like agent.gamma=0.99"
    words = text.split()
    if len(words) > 1 and all(SIMPLE.fullmatch(word) for word in words):
        return f"{text}: holds several overrides; write them apart: {', '.join(map(repr, words))}"
    if not PLAIN_VALUE.fullmatch(value) and not {"'", '"'} & set(value):
        return f"{text}: quote a value with such characters: '{key}=\"{value}\"'"
    return f"{text}: the value cannot be read; to mean it literally: '{key}=\"…\"'"


def _as_mapping(value: str) -> str:
    """Return JSON, or a call's keywords, as Hydra reads a mapping."""
    value = re.sub(r"""(["'])([A-Za-z_][\w.:]*)\1(?=\s*:)""", r"\2", value)
    return re.sub(r"([{,]\s*)(\w+)\s*=\s*", r"\1\2: ", value)


def _is_readable(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(escape_colons(text))
    except Exception:  # as in `explain.explain`
        return False
    return True
