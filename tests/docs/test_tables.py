"""Generated tables are up to date with docs/data and the code."""

import json
import re

import pytest
from page_script import page_script

writer = page_script("tables")
FIGURE = re.compile(r"\b123,?456\b")
FIGURES = {"gpu.jsonl": "steps_per_second", "machinery.jsonl": "ratio", "results.jsonl": "score"}


@pytest.mark.parametrize("page", sorted({table.page for table in writer.TABLES}))
def test_the_tables_are_up_to_date(page):
    assert (writer.DOCS / page).read_text() == writer.page(page), "run: python docs/tables.py"


DATA = [table for table in writer.TABLES if table.file.endswith(".jsonl")]


@pytest.mark.parametrize("table", DATA, ids=lambda table: table.file)
def test_a_changed_figure_or_a_deleted_line_changes_the_table(table):
    lines = (writer.DOCS.parent / table.file).read_text().splitlines()
    measured = [json.loads(line) for line in lines]
    before = table.write(measured)
    key = FIGURES.get(table.file.rpartition("/")[2], list(measured[0])[-2])
    changed = table.write([measured[0] | {key: 123_456}, *measured[1:]])
    assert len(FIGURE.findall(before)) == 0 and len(FIGURE.findall(changed)) == 1
    assert table.write(measured[1:]) != before


@pytest.mark.parametrize("table", DATA, ids=lambda table: table.file)
def test_every_figure_says_how_it_was_measured(table):
    for line in (writer.DOCS.parent / table.file).read_text().splitlines():
        each = json.loads(line)
        assert {"processor", "commit", "date"} <= each.get("measured", each).keys()


def test_names_of_other_trainers_lead_to_keys():
    [table] = [table for table in writer.TABLES if table.page == "coming-from.md"]
    rows = [line for line in table.text().splitlines() if "`n_steps`" in line]
    assert [row.split(" |")[0] for row in rows] == ["| `agent.n_step`", "| `agent.rollout_steps`"]
