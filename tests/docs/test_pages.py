"""Documentation: every tag is documented, links lead to files, comparisons have sources."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from steadyrl.agents.registry import ALGORITHMS
from steadyrl.training.checkpoints.summary import Summary
from steadyrl.training.config.overrides import MUTABLE_GROUPS, MUTABLE_KEYS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TAG = re.compile(r"(?:rollout|eval|train|time|buffer|memory)/[a-z][a-z_0-9]*")
LAYERS = ("agents", "envs", "memory", "training")


def sources():
    return [path.read_text() for layer in LAYERS for path in (ROOT / layer).rglob("*.py")]


def test_written_tags_are_documented_and_documented_tags_written():
    # Tags of one algorithm may be on its own page.
    pages = [ROOT / "docs" / f"{name}.md" for name in ALGORITHMS]
    pages = [ROOT / "docs" / "metrics.md", *(page for page in pages if page.exists())]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    rows = [line.split("|")[1] for line in lines if line.startswith("| `") and TAG.match(line[3:])]
    documented = {tag for row in rows for tag in re.findall(r"`([^`]+)`", row)}
    code = "\n".join(sources())
    written = {text for text in re.findall(r'"([^"\n]*)"', code) if TAG.fullmatch(text)}
    assert len(written) > 25
    assert sorted(written - documented) == []
    # Some tags are composed from names: of buffers, of a loss' metrics.
    names = set(re.findall(r"[a-z_]+", code))
    made = {tag for tag in documented if tag.split("/")[1].removesuffix("_mb") in names}
    assert sorted(documented - written - made) == []


def test_every_key_of_the_summary_is_documented():
    page = (ROOT / "docs" / "metrics.md").read_text()
    section = page[page.index("## The result") : page.index("## Where the time goes")]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = [key for row in rows for key in re.findall(r"`([^`]+)`", row)]
    assert sorted(documented) == sorted(field.name for field in fields(Summary))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    # Also those behind a name: `[name]: file`, and of pages that include another one.
    links = re.findall(r"(?:\]\(|^\[[^\]]+\]: )(?!https?://)([^)#\s]+)", page.read_text(), re.M)
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name
)
def test_code_that_a_page_names_exists(page):
    assert [name for name in code_names(page.read_text()) if not defined(*name)] == []


def code_names(text):
    """Return (path, name) of every `path.py: name`, and ("", class, member) of `Class.member`."""
    yield from re.findall(r"`((?:\w+/)+\w+\.py): (\w+)`", text)
    yield from (("", *names) for names in re.findall(r"`([A-Z]\w+)\.(\w+)`", text))


def defined(path, name, member=None):
    """Return whether the code has a definition, which a class of others need not be."""
    definition = re.compile(rf"^(?:class|def) {name}\b|^{name}\b.*=", re.M)
    if path:
        return bool(definition.search((ROOT / path).read_text()))
    folders = ("agents", "buffers", "core", "envs", "memory", "training")
    files = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    own = [text for text in files if re.search(rf"^class {name}\b", text, re.M)]
    return not own or any(re.search(rf"\b(?:def |self\.)?{member}\b", text) for text in own)


def test_names_that_do_not_exist_are_found():
    text = "`agents/ppo/loss.py: ppo_loss`, `agents/ppo/loss.py: gone`, `PPO.update`, `PPO.gone`"
    found = [name for name in code_names(text) if not defined(*name)]
    assert found == [("agents/ppo/loss.py", "gone"), ("", "PPO", "gone")]


def comparison_rows(section):
    """Return [trainer, answer, note] for every row of a comparison."""
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if row[0].strip() != "trainer"]


def test_the_readmes_comparison_equals_the_page():
    page = (ROOT / "docs" / "comparison.md").read_text()
    sections = dict(part.split("\n", 1) for part in re.split(r"^#+ ", page, flags=re.M)[1:])
    readme = (ROOT / "README.md").read_text()
    rows_ = re.findall(r"^\| \[(.+?)\]\(docs/comparison\.md#(\S+)\) \|(.+)\|$", readme, re.M)
    assert len(rows_) == 8
    for title, anchor, cells in rows_:
        assert anchor == re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        answers = [cell.strip().replace("–", "not found") for cell in cells.split("|")]
        assert answers == [answer for _, answer, _ in comparison_rows(sections[title])], title


def test_features_of_other_libraries_have_sources():
    page = (ROOT / "docs" / "comparison.md").read_text()
    features = page.split("\n## Features\n")[1].split("\n## Speed\n")[0]
    rows = [row for part in features.split("\n### ")[1:] for row in comparison_rows(part)]
    assert len(rows) == 7 * 17
    others = [row for row in rows if row[0] != "SteadyRL" and row[1] in ("yes", "in part")]
    assert [row for row in others if "][" not in row[2]] == []
    assert {answer for _, answer, _ in rows} == {"yes", "in part", "no", "not found"}
    assert set(re.findall(r"\]\[([\w-]+)\]", page)) == set(
        re.findall(r"^\[([\w-]+)\]: ", page, re.M)
    )


def test_keys_that_may_change_on_resume_are_those_of_the_program():
    page = (ROOT / "docs" / "long-runs.md").read_text()
    sentence = re.search(r"^These keys may change: .*?\. ", page, re.M | re.S)[0]
    keys = {*MUTABLE_KEYS, *(group.removesuffix(".") for group in MUTABLE_GROUPS)}
    assert set(re.findall(r"`([^`]+)`", sentence)) == keys


def test_one_version_and_date_everywhere():
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', project, re.M)[1]
    heading = re.search(r"^## (\S+) — (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = (ROOT / "CITATION.cff").read_text()
    assert heading.groups() == (version, re.search(r"^date-released: (\S+)$", citation, re.M)[1])
    assert f"version: {version}\n" in citation
