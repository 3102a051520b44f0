"""Tables of measurements are up to date with docs/data."""

import json

from page_script import page_script


def test_the_tables_are_up_to_date():
    writer = page_script("tables")
    assert writer.PAGE.read_text() == writer.page(), "run: python docs/tables.py"


def test_a_changed_figure_changes_the_table(tmp_path, monkeypatch):
    writer = page_script("tables")
    before = writer.gpu_table()
    lines = (writer.DOCS / "data" / "gpu.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"steps_per_second": 123_456}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gpu.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]))
    monkeypatch.setattr(writer, "DOCS", tmp_path)
    assert "| 123,456 |" in writer.gpu_table()
    assert len(writer.gpu_table().splitlines()) == len(before.splitlines()) == 2 + len(lines)
