"""The site builds without warnings, finds what people look for, and every page is in its menu."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path):
    """Return a copy of all that the site is made of."""
    pytest.importorskip("zensical")
    for name in ("docs", "steadyrl"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def build(folder):
    """Build the site in a folder as CI does; return the finished process."""
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("resume", "long-runs"),
        ("mask", "environments"),
        ("leak", "memory"),
        ("own environment", "own-environment"),
    ],
)
def test_the_search_finds_pages(project, query, page):
    done = build(project)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((project / "site" / "search.json").read_text())
    # The search puts hits in titles first: the page has one, and pages that only compare have none.
    hits = {i["location"].split("/")[0] for i in found["items"] if query in i["title"].lower()}
    assert page in hits and "comparison" not in hits


def test_the_page_on_contributing_is_that_of_the_repository(project):
    assert build(project).returncode == 0
    page = (project / "site" / "contributing" / "index.html").read_text()
    titles = re.findall(r"^##? (.+)$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert "Release" in titles
    shown = [re.sub("<[^>]+>|&para;", "", text) for text in re.findall(r"<h[12].*?</h[12]>", page)]
    assert [title for title in titles if title not in shown] == []
    assert "start:page" not in page
    links = re.findall(r'href="\.\./([\w/-]+)/"', page)  # the build does not check what is included
    assert "adding-an-algorithm" in links
    assert [link for link in links if not (project / "site" / link).is_dir()] == []


@pytest.mark.parametrize(
    "link", ["[gone](gone.md)", "[gone](memory.md#gone)"], ids=["page", "section"]
)
def test_a_dead_link_fails_the_build(project, link):
    page = project / "docs" / "index.md"
    page.write_text(f"{page.read_text()}\n{link}\n")
    assert build(project).returncode != 0


def test_every_page_is_in_the_menu():
    def pages(menu):
        for entry in menu:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                yield from [value] if isinstance(value, str) else pages(value)

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(pages(config["nav"]))
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    assert config["strict"]
