"""Write the tables of pages that are made from data: measurements in docs/data, and names of keys.

`python docs/tables.py` writes them, `--check` says whether they are as they would be written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any, NamedTuple

import numpy as np

DOCS = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))

from steadyrl.training.analysis.estimates import interquartile_mean  # noqa: E402
from steadyrl.training.analysis.normalised import Normaliser  # noqa: E402
from steadyrl.training.config.hints.other_trainers import CLEANRL, OTHERS, SB3, TIANSHOU, ZOO  # noqa: E402
from steadyrl.training.evaluation.t_distribution import t_quantile  # noqa: E402

BEGIN, END = "<!-- from {} by docs/tables.py -->\n", "<!-- end -->\n"
ATARI_100K = "atari100k_"  # of the experiments' names
ATARI_TEXT = """
Atari 100k, `experiment=… env.id=ALE/GAME-v5`: mean and 95 % interval over seeds of the evaluation
at the end, or the score of one seed. The last row is the interquartile mean over these games of
each game's mean, normalised to a human's score. Published results are those of
`docs/data/references_atari100k.jsonl`.

"""
SHORT_NAMES = {"SteadyRL": "", "Stable-Baselines3": "SB3 "}
PARTS = ("act", "env", "observe", "update")


def gpu_table(measured: list[dict[str, Any]]) -> str:
    """Return speeds on a GPU; parts of a step in µs where measured."""
    head = ("work", "updates", "steps/s", "updates/s", "act", "environments", "store", "update")
    rows = []
    for each in measured:
        parts = each.get("microseconds_per_step")
        times = [f"{parts[part]:.0f}" if parts else "" for part in PARTS]
        speeds = (f"{each[name]:,.0f}" for name in ("steps_per_second", "updates_per_second"))
        rows.append((each["work"], each["way"], *speeds, *times))
    return _table(head, rows, left=2)


def machinery_table(measured: list[dict[str, Any]]) -> str:
    """Return how much longer whole runs take without a piece of machinery."""
    head = ("without", "run", "times as long", "CPU seconds", "peak memory, MB", "with all, s")
    rows = [
        (
            each["without"],
            each["run"],
            *(f"{each[name]:.2f}" for name in ("ratio", "cpu_ratio")),
            f"{each['peak_mb']:+d}".replace("-", "−"),
            f"{each['seconds']:.1f}",
        )
        for each in sorted(measured, key=lambda each: str(each["without"]))
    ]
    return _table(head, rows, left=2)


def rows_table(measured: list[dict[str, Any]]) -> str:
    """Return a column for each key but `measured`, and below the table how it was measured."""
    head = list(dict.fromkeys(key for each in measured for key in each if key != "measured"))
    rows = [tuple(_cell(each.get(key, "")) for key in head) for each in measured]
    left = sum(all(isinstance(each.get(key, ""), str) for each in measured) for key in head[:2])
    ways = sorted((each["measured"] for each in measured), key=lambda way: way["date"])
    times = dict.fromkeys("{date}, {commit}".format(**way) for way in ways)
    caption = "*{processor}; {times}:* `{command}`".format(times="; ".join(times), **ways[-1])
    return _table(tuple(head), rows, left=max(1, left)) + f"\n{caption}\n"


def _cell(value: object) -> str:
    if isinstance(value, (int, float)):
        return f"{value:,}".replace("-", "−")
    return str(value)


def results_tables(measured: list[dict[str, Any]]) -> str:
    """Return the table of presets, and a section on Atari 100k if there are results."""
    atari = [each for each in measured if each["experiment"].startswith(ATARI_100K)]
    presets = presets_table([each for each in measured if each not in atari])
    return presets + (atari_section(atari) if atari else "")


def presets_table(measured: list[dict[str, Any]]) -> str:
    """Return scores of presets by seed, with their mean and 95 % interval, and a reference."""
    references = {each["experiment"]: each["reference"] for each in _data("references")}
    rows = []
    for name in dict.fromkeys([*references, *(each["experiment"] for each in measured)]):
        runs = sorted((e for e in measured if e["experiment"] == name), key=lambda e: e["seed"])
        if not runs:
            continue
        listed, average = _scores(runs)
        cells = (
            f"`{name}`",
            f"{round(runs[0]['steps'], -3):,}",
            listed,
            average,
            references.get(name, ""),
        )
        rows.append(tuple(cell.replace("-", "−") if i else cell for i, cell in enumerate(cells)))
    head = ("preset", "steps", "seeds 0, 1, …", "mean and 95 % interval", "reference")
    return _table(head, rows, left=1)


def _scores(runs: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the scores of runs, and the mean of several with its interval."""
    scores = [run["score"] for run in runs]
    listed = ", ".join(f"{score:,.1f}" for score in scores)
    return listed, f"{fmean(scores):,.1f} ± {_half_width(scores):,.1f}" if len(runs) > 1 else ""


def atari_section(measured: list[dict[str, Any]]) -> str:
    """Return scores by game beside published ones, and interquartile means over these games."""
    normalise, published = Normaliser("atari"), _data("references_atari100k")
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}  # by experiment and game
    for each in sorted(measured, key=lambda each: each["seed"]):
        ours = runs.setdefault(each["experiment"], {})
        ours.setdefault(normalise.game(_env(each)), []).append(each)
    order = [*(each["experiment"] for each in published), *runs]  # as published, then variants
    runs = {name: runs[name] for name in dict.fromkeys(order) if name in runs}
    games = sorted({game for ours in runs.values() for game in ours})
    head = ["game", "random", "human", *(each["agent"] for each in published)]
    last = ["interquartile mean, normalised", "0", "1"]
    last += [_interquartile_mean(normalise, each["scores"], games) for each in published]
    rows = [
        [game, *(f"{end:,.1f}" for end in normalise.ends(game))]
        + [f"{each['scores'][game]:,.1f}" for each in published]
        for game in games
    ]
    for name, ours in runs.items():
        columns = 2 if any(len(each) > 1 for each in ours.values()) else 1
        head += [f"`{name}`", "seeds 0, 1, …"][:columns]
        for game, cells in zip(games, rows, strict=True):
            listed, average = _scores(ours[game]) if game in ours else ("", "")
            cells += [average or listed, listed if average else ""][:columns]
        means = {game: fmean(run["score"] for run in each) for game, each in ours.items()}
        whole = len(means) == len(games)
        last += [_interquartile_mean(normalise, means, games) if whole else "", ""][:columns]
    cells = [tuple(cell.replace("-", "−") for cell in row) for row in (*rows, last)]
    return ATARI_TEXT + _table(tuple(head), cells, left=1)


def _interquartile_mean(
    normalise: Normaliser, scores: Mapping[str, float], games: Sequence[str]
) -> str:
    found = np.array([normalise(game, np.array(scores[game])) for game in games])
    return f"{interquartile_mean(found):.3f}"


def defaults_table(measured: list[dict[str, Any]]) -> str:
    """Return the scores of both libraries' defaults, and where the mean of ours is the lower."""
    scores: dict[str, dict[str, dict[int, list[float]]]] = {}  # by environment, column and seed
    for each in sorted(measured, key=lambda each: each["seed"]):
        column = f"{SHORT_NAMES[each['by']]}{each['agent'].upper()}"
        of = scores.setdefault(each["environment"], {}).setdefault(column, {})
        of.setdefault(each["seed"], []).append(each["score"])
    columns, rows = ("DQN", "SB3 DQN", "PPO", "SB3 PPO"), []
    for name in dict.fromkeys(each["environment"] for each in measured):
        run = next(each for each in measured if each["environment"] == name)
        listed = [_listed(_by_seed(scores[name].get(column, {}))) for column in columns]
        chosen = "yes" if run["chosen_on"] else "no"
        rows.append((_shown(name), f"{run['steps']:,}", chosen, *listed))
    text = _table(("environment", "steps", "chosen on", *columns), rows, left=1)
    text += _against_sb3("DQN", scores) + _against_sb3("PPO", scores)
    newest = max(reversed(measured), key=lambda each: each["date"])
    makers = {"AMD": "AMD EPYC", "Intel": "Intel Xeon"}
    used = [name for of, name in makers.items() if any(of in e["processor"] for e in measured)]
    way = f"*{' and '.join(used)}; up to {newest['date']}, {newest['commit']}:*"
    return text + f"\n{way} `python scripts/benchmark.py defaults`\n"


def _shown(environment: str) -> str:
    """Return the name of an environment, without a module, and its option."""
    name, _, option = environment.partition(",")
    key, _, value = option.rpartition("=")
    if key == "eval.episodes":
        value += " episodes"
    elif value in ("false", "true"):
        value = f"{key.rpartition('.')[2]}={value}"
    return f"`{name.rpartition(':')[2]}`" + f", {value}" * bool(value)


def _against_sb3(agent: str, scores: dict[str, dict[str, dict[int, list[float]]]]) -> str:
    """Return on how many environments the mean of ours is at least theirs, and where it is not."""
    both = {
        name: (_by_seed(of[agent]), _by_seed(of[f"SB3 {agent}"]))
        for name, of in scores.items()
        if {agent, f"SB3 {agent}"} <= of.keys()
    }
    listed = [
        f"`{name}` ({_short(fmean(a))} against {_short(fmean(b))}, {_interval(a, b)})"
        for name, (a, b) in both.items()
        if fmean(a) < fmean(b)
    ]
    lower = "; a lower one on " + ", ".join(listed) if listed else ""
    count = f"{len(both) - len(listed)} of {len(both)}"
    return f"\n{agent}: a mean at least as high on {count} environments{lower}.\n"


def _by_seed(scores: dict[int, list[float]]) -> list[float]:
    """Return the mean of each seed, which counts once on however many machines it ran."""
    return [fmean(each) for each in scores.values()]


def _listed(seeds: list[float]) -> str:
    """Return up to four scores, or the mean of more with its 95 % interval."""
    if len(seeds) <= 4:
        return ", ".join(map(_short, seeds))
    half = float(f"{_half_width(seeds):.2g}")
    return f"{_short(fmean(seeds))} ± {_short(half)} ({len(seeds)} seeds)"


def _half_width(scores: list[float]) -> float:
    """Return half the width of the mean's 95 % interval (Student's t)."""
    return t_quantile(len(scores) - 1) * stdev(scores) / len(scores) ** 0.5


def _interval(ours: list[float], theirs: list[float]) -> str:
    """Return whether 0 is in the 95 % interval of the difference of means (Welch)."""
    if min(len(ours), len(theirs)) < 2:
        return "one seed"
    a, b = (variance(each) / len(each) for each in (ours, theirs))
    if a + b == 0:
        return "clearly"
    freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1))
    half = t_quantile(max(1, int(freedom))) * (a + b) ** 0.5
    return "within the interval" if fmean(theirs) - fmean(ours) <= half else "clearly"


def _short(score: float) -> str:
    short = f"{score:,.0f}" if abs(score) >= 100 else f"{score + 0.0:.3g}"  # no -0
    return short.replace("-", "−")


def _env(line: dict[str, Any]) -> str:
    """Return the environment of a run from its line, or else from its command."""
    found = re.search(r"env\.id=(\S+)", line["command"])
    return str(line.get("env") or (found[1] if found else ""))


def _data(name: str) -> list[dict[str, Any]]:
    lines = (DOCS / "data" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def names_table(measured: list[dict[str, Any]]) -> str:
    """Return our key for each name that other trainers have for it."""
    trainers = (SB3, ZOO, CLEANRL, TIANSHOU)
    named: dict[tuple[str, str], dict[str, list[str]]] = {}
    for each in OTHERS:
        row = named.setdefault((each.agent or "all", each.key), {})
        for trainer in trainers:
            if trainer in each.of:
                row.setdefault(trainer, []).append(f"`{each.name}`")
    rows = [
        (f"`{key}`", agent, *(", ".join(row.get(trainer, [])) for trainer in trainers))
        for (agent, key), row in sorted(named.items())
        if row
    ]
    return _table(("here", "agent", *trainers), rows, left=6)


class Source(NamedTuple):
    """Where a table stands, where its content comes from, and the function that writes it."""

    page: str
    file: str  # within the repository
    write: Callable[[list[dict[str, Any]]], str]

    def text(self) -> str:
        """Return the table as its source has it."""
        if not self.file.endswith(".jsonl"):
            return self.write([])
        lines = (DOCS.parent / self.file).read_text().splitlines()
        return self.write([json.loads(line) for line in lines])


MEASURED = ("race", "dqn", "dqn_small_replay", "ppo", "replay", "replay_memory", "startup")
MEASURED += ("environments",)
STUDIES = ("n_step", "distributions", "rainbow_parts", "noisy", "minatar")
STUDIES += ("recurrent", "masks", "teacher", "rnd")
GUARDS = ("graph_leak", "healthy", "watch")
SAVING = ("saves", "kills", "kill_loop", "signals")
TABLES = (
    Source("results.md", "docs/data/results.jsonl", results_tables),
    Source("results.md", "docs/data/defaults.jsonl", defaults_table),
    *(Source("results.md", f"docs/data/{name}.jsonl", rows_table) for name in STUDIES),
    *(Source("performance.md", f"docs/data/{name}.jsonl", rows_table) for name in MEASURED),
    Source("performance.md", "docs/data/gpu.jsonl", gpu_table),
    Source("measuring.md", "docs/data/machinery.jsonl", machinery_table),
    Source("measuring.md", "docs/data/fused.jsonl", rows_table),
    Source("measuring.md", "docs/data/products.jsonl", rows_table),
    Source("soak.md", "docs/data/soak.jsonl", rows_table),
    *(Source("memory.md", f"docs/data/{name}.jsonl", rows_table) for name in GUARDS),
    *(Source("long-runs.md", f"docs/data/{name}.jsonl", rows_table) for name in SAVING),
    Source("coming-from.md", "training/config/hints/other_trainers.py", names_table),
)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], *, left: int) -> str:
    """Return a Markdown table; columns after the first `left` are aligned to the right."""
    marks = ["---"] * left + ["---:"] * (len(head) - left)
    lines = ("| " + " | ".join(cells) + " |\n" for cells in (head, *rows))
    first, *rest = lines
    return f"{first}|{'|'.join(marks)}|\n" + "".join(rest)


def page(name: str) -> str:
    """Return a page with its tables as their sources have them."""
    text = (DOCS / name).read_text()
    for table in TABLES:
        if table.page == name:
            begin = BEGIN.format(table.file)
            before, rest = text.split(begin)
            _, after = rest.split(END, 1)
            text = before + begin + "\n" + table.text() + "\n" + END + after
    return text


if __name__ == "__main__":
    pages = {table.page: page(table.page) for table in TABLES}
    if "--check" in sys.argv[1:]:
        sys.exit(any(text != (DOCS / name).read_text() for name, text in pages.items()))
    for name, text in pages.items():
        (DOCS / name).write_text(text)
