"""Write docs/configuration.md: every key's type from the dataclasses, the rest from the YAML.

`python docs/configuration.py` writes it, `--check` says whether it is as it would be written.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from steadyrl.agents.registry import ALGORITHMS  # noqa: E402 (from the checkout that this file is in)
from steadyrl.core.errors import show  # noqa: E402
from steadyrl.training.config.hints.other_trainers import ABSENT, OTHERS  # noqa: E402
from steadyrl.training.config.settings import RunSettings  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

All keys with their types, defaults and meanings (`python docs/configuration.py` writes this page).

```bash
steadyrl train agent=ppo env=acrobot agent.learning_rate=1e-3 total_steps=200_000
steadyrl train experiment=cartpole_dqn --cfg job
```

Select a group by the name of its file (`agent=ppo`, `env=acrobot`, `experiment=cartpole_dqn`;
`--help` lists them), and set a key by its full name. Integers may be written `1e6` and `500_000`.
Unknown keys, wrong types and values out of range are refused. An `experiment` is a preset tuned for
one environment. Keys of the command line override those of an experiment, and these the defaults
below; `configs/env/*.yaml` have defaults of their own.

```bash
steadyrl train -m seed=0,1 agent=dqn,ppo total_steps=20_000
```

starts one run for each combination ([Many runs](many-runs.md)).
"""
NAMES = """## Names in other libraries

These names are refused with an error that gives the key here, or says why there is none. All
counts here are environment steps, for any number of environments; other libraries may count
differently.
"""
BASICS = {int: "integer", float: "float", str: "string", bool: "`true`, `false`"}
NO_KEYS = ("defaults", "hydra")  # Hydra's own


class Key(NamedTuple):
    """One key as its file says it."""

    name: str
    default: Any
    meaning: str


def keys(path: Path) -> list[Key]:
    """Return the keys of a YAML file with the comments above them or behind them."""
    text = path.read_text()
    lines = text.splitlines()
    found = yaml.compose(text)
    assert isinstance(found, yaml.MappingNode)
    return list(_below(found, lines, yaml.safe_load(text), ""))


def _below(node: yaml.MappingNode, lines: list[str], values: Any, path: str) -> Iterator[Key]:
    for key, value in node.value:
        if not path and key.value in NO_KEYS:
            continue
        name, given = f"{path}{key.value}", values[key.value]
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _below(value, lines, given, f"{name}.")
        else:
            behind = lines[value.end_mark.line][value.end_mark.column :].partition("#")[2].strip()
            short = behind[:1].upper() + behind[1:]
            yield Key(name, given, short or _above(lines, key.start_mark.line))


def _above(lines: list[str], line: int) -> str:
    comment: list[str] = []
    while line and lines[line - 1].lstrip().startswith("# "):
        line -= 1
        comment.insert(0, lines[line].strip().removeprefix("# "))
    return " ".join(comment)


def hints(cls: Any, path: str = "") -> dict[str, Any]:
    """Return the type of every full key of a settings class."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= hints(hint, f"{path}{name}.")
        else:
            found[path + name] = hint
    return found


def kind(hint: Any) -> str:
    """Say in words what a key takes."""
    origin, members = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in members)
    if origin in (Union, types.UnionType):
        return ", ".join("`null`" if m is type(None) else kind(m) for m in members)
    if origin is tuple:
        inside = members[0] if members[0] in BASICS else None
        return (
            f"list of {BASICS[inside]}s" if inside else "list of names, or of `{name: arguments}`"
        )
    if origin is dict:
        return "mapping"
    return BASICS[hint]


def written(value: Any) -> str:
    """Return a default as one would type it."""
    number = isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000
    return f"{value:_}" if number else str(show(_as_read(value)))


def _as_read(value: Any) -> Any:
    """Undo YAML 1.1, to which 3e-4 is text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def table(path: Path, cls: Any, prefix: str, inside: str = "") -> str:
    """Return the rows of one file, whose keys are those of `cls` below `inside`."""
    known = hints(cls)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys(path):
        hint = known[inside + key.name]
        meaning = key.meaning.replace("<", "\\<")  # no HTML
        cells = (f"`{prefix}{key.name}`", kind(hint), f"`{written(key.default)}`", meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def sections() -> Iterator[tuple[str, Path, Any, str, str]]:
    """Yield every file with keys: its heading, its path, whose keys, and where they are."""
    configs = ROOT / "configs"
    yield "The run", configs / "config.yaml", RunSettings, "", ""
    yield "Environment", configs / "env_defaults.yaml", RunSettings, "env.", "env."
    for name, algorithm in ALGORITHMS.items():
        heading = f"Agent `{name}`"
        yield heading, configs / "agent" / f"{name}.yaml", algorithm.settings, "agent.", ""
    yield "Memory", configs / "memory" / "default.yaml", RunSettings, "memory.", "memory."


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for heading, path, cls, prefix, inside in sections():
        source = path.relative_to(ROOT)
        parts.append(f"## {heading}\n\n`{source}`\n\n{table(path, cls, prefix, inside)}\n")
    parts.append(names())
    return "\n".join(parts)


def names() -> str:
    """Return the table of the names of other trainers."""
    head = ["| name | of | here | agent |", "|---|---|---|---|"]
    others = [f"| `{n.name}` | {n.of} | `{n.key}` | {n.agent or ''} |" for n in OTHERS]
    absent = [f"| `{a.name}` | {a.of} | {a.reason('…')} | |" for a in ABSENT]
    return "\n".join([NAMES, *head, *others, *absent, ""])


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit(f"{PAGE} is not up to date: run python docs/configuration.py")
