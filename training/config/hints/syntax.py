"""Overrides that Hydra's grammar cannot read: how to write them."""

from __future__ import annotations

import re

from hydra.core.override_parser.overrides_parser import OverridesParser

from steadyrl.training.config.overrides import escape_colons

SIMPLE = re.compile(r"[A-Za-z_][\w.]*=[^\s='\"]+", re.ASCII)  # an override without spaces

PLAIN_VALUE = re.compile(r"[\w.,:/+\-\[\]{}()$*%@?|\\]*", re.ASCII)


def explain_syntax(text: str) -> str:
    """Return the line for an override that cannot be read."""
    text = text.removeprefix("++").replace("\\:", ":")  # as it was typed
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
        return f"{text}: {key!r} is no key: write {key.split()[-1].lstrip('/')}={value or '…'}"
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
