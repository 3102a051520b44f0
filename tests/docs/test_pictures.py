"""Pictures are drawn from docs/data, follow light and dark, and each is shown with an alt text."""

import re
from pathlib import Path

import pytest
from page_script import page_script

ROOT = Path(__file__).parents[2]
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)|<img[^>]*>")
drawer = page_script("pictures")
DRAWN = drawer.pictures()
DATA = {"races": drawer.read(drawer.RACE)}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def shown():
    """Yield (page, alt text, file) of every picture of the pages."""
    for page in PAGES:
        for found in IMAGE.finditer(page.read_text()):
            yield page.name, found[1] or "", found[2] or found[0]


def data_of(name):
    """Return the data lines of a chart, and the function that draws them."""
    if name == "races":
        return DATA[name], drawer.races
    lines = [line for line in drawer.read(drawer.CURVES) if line["chart"] == name]
    return lines, lambda data: drawer.curves(name, data)


@pytest.mark.parametrize("name", DRAWN)
def test_the_picture_is_up_to_date(name):
    written = (ROOT / "docs" / f"{name}.svg").read_text()
    assert written == DRAWN[name], "run: python docs/pictures.py"


@pytest.mark.parametrize("name", DRAWN)
def test_a_changed_figure_or_a_deleted_line_changes_the_picture(name):
    data, draw = data_of(name)
    assert draw(data) == DRAWN[name]
    assert draw(data[:-1]) != DRAWN[name]
    last = data[-1]
    if name == "races":
        changed = {"seconds": last["seconds"] + 1}
    else:
        changed = {"values": [*last["values"][:-1], last["values"][-1] * 1.2 + 20]}
    assert draw([*data[:-1], last | changed]) != DRAWN[name]


def test_every_curve_says_how_it_was_measured():
    for line in drawer.read(drawer.CURVES):
        assert {"processor", "date", "commit", "command"} <= line["measured"].keys()
        assert len(line["steps"]) == len(line["values"]) <= drawer.MOST_POINTS + 1


def test_every_picture_has_an_alt_text():
    few = [(page, file) for page, alt, file in shown() if len(alt.split()) < 5]
    assert few == [], "say in the alt text what the picture shows"


def test_every_picture_is_shown_and_every_drawing_has_a_program():
    files = {path.name for kind in ("svg", "png", "gif") for path in ROOT.glob(f"docs/*.{kind}")}
    assert files == {Path(file).name for _, _, file in shown()}
    drawings = {f"{name}.svg" for name in [*DRAWN, "architecture"]}
    assert {file for file in files if file.endswith(".svg")} == drawings


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/*.svg")), ids=lambda path: path.name)
def test_drawings_follow_light_and_dark(path):
    light, _, dark = path.read_text().partition("@media(prefers-color-scheme:dark)")
    assert "text{" in light and "text{fill:#e" in dark and ".back{" in dark


def test_the_bands_cover_all_seeds():
    runs = [
        {"line": "a", "steps": [1, 2, 3], "values": [1.0, 5.0, 2.0]},
        {"line": "a", "steps": [1, 2], "values": [3.0, 1.0], "resumed": [1, 1]},
        {"line": "b", "steps": [7], "values": [4.0]},
    ]
    a, b = drawer.lines_of(runs)
    assert a == ("a", [1, 2], [2.0, 3.0], [1.0, 1.0], [3.0, 5.0], [1, 1])
    assert b.low == b.mean == b.high == [4.0]
