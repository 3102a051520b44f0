"""Generated tables are up to date with docs/data and the code."""

import json
import re
from statistics import median

import pytest
from page_script import page_script

writer = page_script("tables")
FIGURE = re.compile(r"\b123,?456\b")
FIGURES = {"gpu.jsonl": "steps_per_second", "machinery.jsonl": "ratio"}
FIGURES |= dict.fromkeys(("results.jsonl", "defaults.jsonl"), "score")


@pytest.mark.parametrize("page", sorted({table.page for table in writer.TABLES}))
def test_the_tables_are_up_to_date(page):
    assert (writer.DOCS / page).read_text() == writer.page(page), "run: python docs/tables.py"


DATA = [table for table in writer.TABLES if table.file.endswith(".jsonl")]


def measured_in(table):
    return [json.loads(line) for line in (writer.DOCS.parent / table.file).read_text().splitlines()]


@pytest.mark.parametrize("table", DATA, ids=lambda table: table.file)
def test_a_changed_figure_or_a_deleted_line_changes_the_table(table):
    measured = measured_in(table)
    before = table.write(measured)
    *others, last = measured
    key = FIGURES.get(table.file.rpartition("/")[2], list(last)[-2])
    changed = table.write([*others, last | {key: 123_456}])
    rows = [line for line in changed.splitlines() if line.startswith("|")]
    assert not FIGURE.search(before) and len(FIGURE.findall("\n".join(rows))) == 1
    assert table.write(others) != before


@pytest.mark.parametrize("table", DATA, ids=lambda table: table.file)
def test_every_figure_says_how_it_was_measured(table):
    for each in measured_in(table):
        assert {"processor", "commit", "date"} <= each.get("measured", each).keys()


def atari_line(game, seed, score, experiment="atari100k_der"):
    command = f"python train.py experiment={experiment} env.id=ALE/{game}-v5 seed={seed}"
    line = {"experiment": experiment, "command": command, "seed": seed, "score": score, "steps": 1}
    return line | {"versions": {}}


def test_atari_100k_has_no_section_without_runs():
    [table] = [table for table in writer.TABLES if table.file.endswith("results.jsonl")]
    presets = [each for each in measured_in(table) if "atari" not in each["experiment"]]
    assert "Atari" not in table.write(presets)
    lines = table.write([*presets, atari_line("Pong", 0, -19.0)])
    assert "Atari 100k" in lines and lines.startswith(table.write(presets))


def test_atari_scores_stand_beside_published_ones_with_the_mean_over_games():
    drq, shift = "atari100k_drq", "atari100k_der agent.augmentation=shift"
    runs = [
        atari_line("Freeway", 0, 3.7, shift),
        atari_line("Pong", 1, 14.6),  # as a human
        atari_line("Pong", 0, -20.7),  # as a random policy
        atari_line("Freeway", 0, 29.6),
        atari_line("Freeway", 1, 29.6 / 2),
        atari_line("Freeway", 0, 7.4, drq),
    ]
    head, _, freeway, pong, mean = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in writer.atari_section(runs).splitlines()
        if line.startswith("|")
    ]
    assert head[3:6] == ["DER", "DrQ(ε)", "`atari100k_der`"]
    assert head[7:] == [f"`{drq}`", f"`{shift}`"]  # of one seed each
    assert pong[:5] == ["Pong", "−20.7", "14.6", "−19.3", "−9.1"]
    assert pong[5].startswith("−3.0 ± ") and pong[6:] == ["−20.7, 14.6", "", ""]
    assert freeway[:5] == ["Freeway", "0.0", "29.6", "27.9", "20.3"]
    assert freeway[7:] == ["7.4", "3.7"]
    # Of each game's mean: 1/2 and 3/4; of two games both count.
    assert mean[5] == "0.625"
    assert mean[3] == f"{((20.7 - 19.3) / (20.7 + 14.6) + 27.9 / 29.6) / 2:.3f}"
    assert mean[7] == mean[8] == ""  # Pong has no such run


def test_published_atari_scores_name_their_source_and_all_games():
    published = {each["agent"]: each for each in writer._data("references_atari100k")}
    for each in published.values():
        assert len(each["scores"]) == 26
        assert f"{each['repository']}/blob/{each['commit']}/{each['file']}" in each["url"]
    # As printed by Schwarzer et al. 2021 for DER, and by Agarwal et al. 2021 for DrQ(ε).
    medians = {"DER": 0.161, "DrQ(ε)": 0.313}
    normalise = writer.Normaliser("atari")
    for agent, printed in medians.items():
        scores = published[agent]["scores"]
        assert median(normalise(game, score) for game, score in scores.items()) == pytest.approx(
            printed, abs=1e-3
        )


def test_a_preset_with_several_runs_has_a_mean_and_its_interval():
    runs = [
        {"experiment": "cartpole_dqn", "seed": i, "score": i + 0.5, "steps": 10} for i in (2, 1)
    ]
    row = "| `cartpole_dqn` | 0 | {} | {} | 500 ± 0 |"
    both = row.format("1.5, 2.5", f"2.0 ± {12.706 / 2:.1f}")  # Student's t for two of them
    assert writer.presets_table(runs).splitlines()[-1] == both
    assert writer.presets_table(runs[:1]).splitlines()[-1] == row.format("2.5", "")


def test_every_result_says_what_it_was_run_with():
    for each in writer._data("results"):
        assert {"torch", "gymnasium", "numpy"} < each["versions"].keys() and each["seconds"] > 1


def test_published_scores_of_presets_name_their_source():
    # Another preset, and a random policy.
    rainbow = {f"{env}_rainbow" for env in ("cartpole", "lunarlander", "minatar_breakout")}
    ours = {"minatar_breakout_dqn", "minatar_breakout_ppo"} | rainbow
    lines = [each for each in writer._data("references") if each["experiment"] not in ours]
    sources = [source for each in lines for source in each["sources"]]
    assert all(each["sources"] for each in lines) and len(lines) > 15
    assert all(re.search("/blob/[0-9a-f]{40}/", source) for source in sources)


def test_a_table_names_every_commit_that_its_rows_were_measured_at():
    def row(preset, date, commit):
        about = {"processor": "P", "date": date, "commit": commit, "command": "race"}
        return {"preset": preset, "seconds": 1.5, "measured": about}

    rows = [row("a", "2026-02-01", "cde"), row("b", "2026-01-01", "abc")]
    assert writer.rows_table([*rows, rows[0]]).splitlines()[-1] == (
        "*P; 2026-01-01, abc; 2026-02-01, cde:* `race`"
    )


def test_every_preset_with_results_has_a_reference():
    names = {each["experiment"] for each in writer._data("results")}
    known = {each["experiment"] for each in writer._data("references")}
    atari = {each["experiment"] for each in writer._data("references_atari100k")}
    # Variants of an Atari preset stand in the table beside it.
    assert {name for name in names if name.split()[0] not in atari} <= known


def test_names_of_other_trainers_lead_to_keys():
    [table] = [table for table in writer.TABLES if table.page == "coming-from.md"]
    rows = [line for line in table.text().splitlines() if "`n_steps`" in line]
    assert [row.split(" |")[0] for row in rows] == ["| `agent.n_step`", "| `agent.rollout_steps`"]


def test_the_table_of_defaults_says_where_ours_are_behind():
    [table] = [table for table in writer.TABLES if table.file.endswith("defaults.jsonl")]
    line = {"environment": "hopper", "agent": "ppo", "seed": 0, "steps": 9, "chosen_on": True}
    line |= {"processor": "P", "date": "2026-01-01", "commit": "abc"}
    # Seed 0 on two machines counts once.
    ours = [line | {"by": "SteadyRL", "score": score} for score in (50.0, 150.0)]
    ours.append(line | {"by": "SteadyRL", "score": 300.0, "seed": 1})
    ahead = table.write([*ours, line | {"by": "Stable-Baselines3", "score": 200.0}])
    assert "\nPPO: a mean at least as high on 1 of 1 environments.\n" in ahead
    behind = table.write([*ours, line | {"by": "Stable-Baselines3", "score": 201.0}])
    assert (
        "\nPPO: a mean at least as high on 0 of 1 environments; a lower one on `hopper`" in behind
    )
    assert "(200 against 201, one seed)" in behind


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        ([1.0, 1.2], [1.1, 1.3], "within the interval"),
        ([1.0, 1.01], [5.0, 5.01], "clearly"),
        ([42.5, 34.6, 32.1, 43.0], [44.2, 42.4, 43.4], "within the interval"),
        ([42.5, 40.6, 41.1, 43.0], [46.2, 45.4, 46.4], "clearly"),
    ],
)
def test_a_difference_is_held_against_welchs_interval(ours, theirs, says):
    ttest = pytest.importorskip("scipy.stats").ttest_ind(ours, theirs, equal_var=False)
    assert (ttest.pvalue < 0.05) == (says == "clearly")
    assert writer._interval(ours, theirs) == says


def test_runs_without_variation_differ_clearly():
    assert writer._interval([1.0, 1.0], [1.5, 1.5]) == "clearly"
