"""Generated tables are up to date with docs/data and the code."""

import json

import pytest
from page_script import page_script

writer = page_script("tables")
FIGURES = {"gpu.jsonl": {"steps_per_second": 123_456}, "machinery.jsonl": {"ratio": 123.456}}
SHOWN = {"gpu.jsonl": "| 123,456 |", "machinery.jsonl": "| 123.46 |"}


@pytest.mark.parametrize("page", sorted({table.page for table in writer.TABLES}))
def test_the_tables_are_up_to_date(page):
    assert (writer.DOCS / page).read_text() == writer.page(page), "run: python docs/tables.py"


@pytest.mark.parametrize("table", writer.TABLES, ids=lambda table: table.file)
def test_a_changed_figure_changes_the_table(table):
    if not table.file.endswith(".jsonl"):
        pytest.skip("made from code")
    name = table.file.rpartition("/")[2]
    lines = (writer.DOCS.parent / table.file).read_text().splitlines()
    measured = [json.loads(line) for line in lines]
    before = table.write(measured)
    changed = table.write([each | FIGURES[name] for each in measured[:1]] + measured[1:])
    assert before.count(SHOWN[name]) == 0 and changed.count(SHOWN[name]) == 1
    assert len(changed.splitlines()) == len(before.splitlines()) == 2 + len(lines)


def test_a_deleted_line_changes_the_table():
    for table in writer.TABLES:
        if table.file.endswith(".jsonl"):
            lines = (writer.DOCS.parent / table.file).read_text().splitlines()
            fewer = table.write([json.loads(line) for line in lines[1:]])
            assert fewer != table.text()


def test_names_of_other_trainers_lead_to_keys():
    [table] = [table for table in writer.TABLES if table.page == "coming-from.md"]
    rows = [line for line in table.text().splitlines() if "`n_steps`" in line]
    assert [row.split(" |")[0] for row in rows] == ["| `agent.n_step`", "| `agent.rollout_steps`"]
