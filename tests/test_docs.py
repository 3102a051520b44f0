"""The pages say what there is: every tag is explained, every link leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TAG = re.compile(r"(?:rollout|eval|train|time|buffer|memory)/[a-z][a-z_0-9]*")
FLOORS = ("agents", "envs", "memory", "training")


def sources():
    return [path.read_text() for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]


def test_every_tag_is_explained_and_every_explained_tag_is_written():
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs" / "METRICS.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    explained = {tag for row in rows for tag in re.findall(r"`([^`]+)`", row)}
    code = "\n".join(sources())
    written = {text for text in re.findall(r'"([^"\n]*)"', code) if TAG.fullmatch(text)}
    assert len(written) > 25
    assert sorted(written - explained) == []
    # Some are put together from names: of the parts that hold memory, of what a loss reports.
    names = set(re.findall(r"[a-z_]+", code))
    made = {tag for tag in explained if tag.split("/")[1].removesuffix("_mb") in names}
    assert sorted(explained - written - made) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
