"""Write the tables of pages that show measurements, from docs/data.

`python docs/tables.py` writes them, `--check` says whether they are as they would be written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "PERFORMANCE.md"
BEGIN, END = "<!-- from data/{} by docs/tables.py -->\n", "<!-- end -->\n"
PARTS = ("act", "env", "observe", "update")


def gpu_table(measured: list[dict[str, Any]]) -> str:
    """Return speeds on a GPU; parts of a step in µs where measured."""
    head = ("work", "updates", "steps/s", "updates/s", "act", "environments", "store", "update")
    rows = []
    for each in measured:
        parts = each.get("microseconds_per_step")
        times = [f"{parts[part]:.0f}" if parts else "" for part in PARTS]
        speeds = (f"{each[name]:,.0f}" for name in ("steps_per_second", "updates_per_second"))
        rows.append((each["work"], each["way"], *speeds, *times))
    return _table(head, rows, left=2)


def machinery_table(measured: list[dict[str, Any]]) -> str:
    """Return how much longer whole runs take without a piece of machinery."""
    head = ("without", "run", "times as long", "CPU seconds", "peak memory, MB", "with all, s")
    rows = [
        (
            each["without"],
            each["run"],
            *(f"{each[name]:.2f}" for name in ("ratio", "cpu_ratio")),
            f"{each['peak_mb']:+d}".replace("-", "−"),
            f"{each['seconds']:.1f}",
        )
        for each in sorted(measured, key=lambda each: str(each["without"]))
    ]
    return _table(head, rows, left=2)


TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "machinery.jsonl": machinery_table,
    "gpu.jsonl": gpu_table,
}


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], *, left: int) -> str:
    """Return a Markdown table; columns after the first `left` are aligned to the right."""
    marks = ["---"] * left + ["---:"] * (len(head) - left)
    lines = ("| " + " | ".join(cells) + " |\n" for cells in (head, *rows))
    first, *rest = lines
    return f"{first}|{'|'.join(marks)}|\n" + "".join(rest)


def page() -> str:
    """Return the page with its tables as the data have it."""
    text = PAGE.read_text()
    for name, write in TABLES.items():
        begin = BEGIN.format(name)
        measured = [json.loads(line) for line in (DOCS / "data" / name).read_text().splitlines()]
        before, rest = text.split(begin)
        _, after = rest.split(END, 1)
        text = before + begin + "\n" + write(measured) + "\n" + END + after
    return text


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(page() != PAGE.read_text())
    PAGE.write_text(page())
