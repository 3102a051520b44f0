"""Draw docs/architecture.svg: layers and their parts, as the imports of the code have them.

`python docs/architecture.py` draws it, `--check` says whether it is as it would be drawn. An arrow
that follows from others is left out; a part stands above all that it imports.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from steadyrl.agents.registry import ALGORITHMS  # noqa: E402 (from the checkout that this file is in)

PICTURE = ROOT / "docs" / "architecture.svg"
PACKAGE = "steadyrl"
# From above; layers that stand side by side do not import one another.
LAYERS = (("training",), ("agents",), ("buffers", "envs"), ("memory",), ("core",))
# A part within a part, at a height of its own.
INNER = ("agents.engine.cpu", "agents.engine.graphs", "agents.learner.learner")
ANY = "algorithms"  # in place of the folders that the registry names, which are equally high
WIDTH, MARGIN, GAP = 1000, 12, 14
ROW, BOX, HEAD, LETTER = 42, 24, 40, 7.2
STYLE = """text{font:12px sans-serif;fill:#1c2733}.name{font-weight:bold;font-size:14px}
.says{fill:#5b6b7b}.layer{fill:#f2f5f8;stroke:#b9c4cf}.part{fill:#fff;stroke:#5b6b7b}
.any{fill:#fff3d6}.arrow{fill:none;stroke:#8a98a6}.back{fill:#fff}
@media(prefers-color-scheme:dark){text{fill:#e4e9ee}.says{fill:#9aa7b4}.back{fill:#12171c}
.layer{fill:#1b2229;stroke:#3d4955}.part{fill:#12171c;stroke:#9aa7b4}.any{fill:#4a3a10}
.arrow{stroke:#7d8b99}}"""
Graph = Mapping[str, set[str]]


class Layer(NamedTuple):
    """One folder at the top of the checkout."""

    name: str
    parts: Graph  # what each imports of the same layer
    below: Mapping[str, set[str]]  # {other layer: what is imported of it}


def imports() -> Iterator[tuple[str, str]]:
    """Yield (importing, imported) modules of the layers, lazy imports included."""
    for layer in (name for height in LAYERS for name in height):
        for path in sorted((ROOT / layer).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text())):
                for name in _named(node):
                    if name.startswith(f"{PACKAGE}.{layer}.") or _is_ours(name):
                        yield module.removesuffix(".__init__"), name.removeprefix(f"{PACKAGE}.")


def _named(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _is_ours(name: str) -> bool:
    head, _, rest = name.partition(".")
    return head == PACKAGE and rest.partition(".")[0] in {f for height in LAYERS for f in height}


def part(module: str) -> str:
    """Return the part that a module is in: agents.learner, or agents.base for a file in none."""
    for inner in INNER:
        if module == inner or module.startswith(f"{inner}."):
            return inner
    layer, first = module.split(".")[:2]
    folders = {entry.module.split(".")[-2] for entry in ALGORITHMS.values()}
    return f"{layer}.{ANY}" if layer == "agents" and first in folders else f"{layer}.{first}"


def layers(pairs: Iterable[tuple[str, str]]) -> dict[str, Layer]:
    """Return the layers by their names, from (importing, imported) modules."""
    parts: dict[str, dict[str, set[str]]] = {f: {} for height in LAYERS for f in height}
    below: dict[str, dict[str, set[str]]] = {f: {} for f in parts}
    for module, target in pairs:
        if "." not in module or "." not in target:
            continue
        layer, other, of, to = (
            module.split(".")[0],
            target.split(".")[0],
            part(module),
            part(target),
        )
        parts[layer].setdefault(of, set())
        if layer != other:
            below[layer].setdefault(other, set()).add(to)
        elif of != to:
            parts[layer][of].add(to)
            parts[layer].setdefault(to, set())
    return {f: Layer(f, _with_all(f, parts[f]), below[f]) for f in parts}


def _with_all(layer: str, found: dict[str, set[str]]) -> Graph:
    """Add the parts that import nothing and are imported by nothing of their layer."""
    for path in sorted((ROOT / layer).iterdir()):
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file():
            found.setdefault(part(f"{layer}.{path.stem}"), set())
    return found


def levels(graph: Graph) -> dict[str, int]:
    """Return how high each part stands: above all that it imports."""
    found: dict[str, int] = {}

    def level(name: str, above: tuple[str, ...]) -> int:
        if name in above:
            raise ValueError(f"imports run in a circle: {' -> '.join((*above, name))}")
        if name not in found:
            found[name] = max((level(t, (*above, name)) + 1 for t in graph[name]), default=0)
        return found[name]

    for name in sorted(graph):
        level(name, ())
    return found


def reduced(graph: Graph) -> Graph:
    """Leave out what is imported by something imported too."""

    def reached(name: str) -> set[str]:
        return {t for target in graph[name] for t in (target, *reached(target))}

    return {n: {t for t in ts if not any(t in reached(o) for o in ts)} for n, ts in graph.items()}


def stacked_parts(layer: Layer) -> list[list[str]]:
    """Return the parts in rows, the highest first, each near the middle of what it imports."""
    height = levels(layer.parts)
    rows: list[list[str]] = [[] for _ in range(max(height.values()) + 1)]
    place: dict[str, float] = {}
    for level in range(len(rows)):
        names = [name for name in sorted(height) if height[name] == level]

        def middle(name: str) -> float:
            below = [place[target] for target in layer.parts[name]]
            return sum(below) / len(below) if below else 0.5

        rows[-1 - level] = sorted(names, key=lambda name: (middle(name), name))
        for at, name in enumerate(rows[-1 - level]):
            place[name] = (at + 0.5) / len(names)
    return rows


def says_below(layer: Layer) -> str:
    """Say what a layer imports of others, part by part where that is little."""
    says = []
    for other in sorted(layer.below):
        parts = sorted(name.partition(".")[2] for name in layer.below[other])
        few = (other, layer.name) == ("envs", "agents")
        says.append(f"{other} ({', '.join(parts)} only)" if few else other)
    return f"imports {', '.join(says)}" if says else "imports nothing of ours"


def drawn(layer: Layer, left: float, top: float, width: float) -> tuple[list[str], float]:
    """Return the elements of one layer, and how high it is."""
    flat = all(name.count(".") == 1 and not (ROOT / name.replace(".", "/")).is_dir()
               for name in layer.parts)  # fmt: skip
    rows = [] if flat else stacked_parts(layer)
    height = HEAD + ROW * len(rows) + (MARGIN if rows else 22)
    out = [_rect(left, top, width, height, "layer")]
    out.append(_text(left + MARGIN, top + 20, f"{layer.name}/", "name"))
    out.append(_text(left + MARGIN, top + 36, says_below(layer), "says"))
    if flat:
        names = ", ".join(sorted(name.partition(".")[2] for name in layer.parts))
        out.append(_text(left + MARGIN, top + 53, names))
    middles: dict[str, tuple[float, float]] = {}
    for at, row in enumerate(rows):
        for place, name in enumerate(row):
            x = left + width * (place + 0.5) / len(row)
            middles[name] = x, top + HEAD + ROW * at + ROW / 2
    for name, targets in sorted(reduced(layer.parts).items() if rows else ()):
        out += [_arrow(middles[name], middles[target]) for target in sorted(targets)]
    for name, (x, y) in middles.items():
        label = name.partition(".")[2].replace(".", "/")
        size = LETTER * len(label) + 16
        kind = "part any" if label == ANY else "part"
        out.append(_rect(x - size / 2, y - BOX / 2, size, BOX, kind))
        out.append(f'<text x="{x:g}" y="{y + 4:g}" text-anchor="middle">{escape(label)}</text>')
    return out, height


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    size = f'width="{width:g}" height="{height:g}" rx="5"'
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size}/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>' if text else ""


def _arrow(one: tuple[float, float], other: tuple[float, float]) -> str:
    (x, y), (to_x, to_y) = (one[0], one[1] + BOX / 2), (other[0], other[1] - BOX / 2)
    bend = (to_y - y) / 2
    path = f"M{x:g},{y:g}C{x:g},{y + bend:g} {to_x:g},{to_y - bend:g} {to_x:g},{to_y:g}"
    return f'<path class="arrow" d="{path}"/>'


def picture() -> str:
    """Return the whole picture."""
    found, top = layers(imports()), 0.0
    body = [_rect(0, top, WIDTH, 44, "layer")]
    body.append(_text(MARGIN, 20, "train.py, steadyrl/, scripts/", "name"))
    body.append(_text(MARGIN, 36, "imports all; a line leads down to what is imported", "says"))
    top += 44 + GAP
    for names in LAYERS:
        most = [max(map(len, stacked_parts(found[name]))) + 1.0 for name in names]
        space, left, highest = WIDTH - GAP * (len(names) - 1), 0.0, 0.0
        for name, part in zip(names, most, strict=True):
            width = round(space * part / sum(most))
            elements, height = drawn(found[name], left, top, width)
            body += elements
            left, highest = left + width + GAP, max(highest, height)
        top += highest + GAP
    size = f'viewBox="-1 -1 {WIDTH + 2} {top - GAP + 2:g}" width="{WIDTH + 2}"'
    lines = "\n".join(line for line in body if line)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n'
        f'<rect class="back" x="-1" y="-1" width="100%" height="100%"/>\n{lines}\n</svg>\n'
    )


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        PICTURE.write_text(picture())
    elif PICTURE.read_text() != picture():
        sys.exit(f"{PICTURE} is not up to date: run python docs/architecture.py")
