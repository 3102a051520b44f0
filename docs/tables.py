"""Write the tables of pages that show measurements, from docs/data.

`python docs/tables.py` writes them, `--check` says whether they are as they would be written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "PERFORMANCE.md"
BEGIN, END = "<!-- from data/gpu.jsonl by docs/tables.py -->\n", "<!-- end -->\n"
PARTS = ("act", "env", "observe", "update")
HEAD = (
    "| work | updates | steps/s | updates/s | act | environments | store | update |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|\n"
)


def gpu_table() -> str:
    """Return the Markdown table of speeds on a GPU; parts of a step in µs where measured."""
    lines = (DOCS / "data" / "gpu.jsonl").read_text().splitlines()
    return HEAD + "".join(_row(json.loads(line)) for line in lines)


def _row(measured: dict[str, object]) -> str:
    parts = measured.get("microseconds_per_step")
    times = [f"{parts[part]:.0f}" if isinstance(parts, dict) else "" for part in PARTS]
    cells = (
        *(str(measured[name]) for name in ("work", "way")),
        *(f"{measured[name]:,.0f}" for name in ("steps_per_second", "updates_per_second")),
        *times,
    )
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    """Return the page with its table as the data have it."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END, 1)
    return before + BEGIN + "\n" + gpu_table() + "\n" + END + after


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(page() != PAGE.read_text())
    PAGE.write_text(page())
