"""Tables of measurements are up to date with docs/data."""

import json

from page_script import page_script

FIGURES = {"gpu.jsonl": {"steps_per_second": 123_456}, "machinery.jsonl": {"ratio": 123.456}}
SHOWN = {"gpu.jsonl": "| 123,456 |", "machinery.jsonl": "| 123.46 |"}


def test_the_tables_are_up_to_date():
    writer = page_script("tables")
    assert writer.PAGE.read_text() == writer.page(), "run: python docs/tables.py"


def test_a_changed_figure_changes_the_table():
    writer = page_script("tables")
    for name, write in writer.TABLES.items():
        lines = (writer.DOCS / "data" / name).read_text().splitlines()
        measured = [json.loads(line) for line in lines]
        before = write(measured)
        changed = write([each | FIGURES[name] for each in measured[:1]] + measured[1:])
        assert before.count(SHOWN[name]) == 0 and changed.count(SHOWN[name]) == 1
        assert len(changed.splitlines()) == len(before.splitlines()) == 2 + len(lines)
