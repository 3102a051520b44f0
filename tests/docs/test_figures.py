"""Figures in sentences, and in tables written by hand, are those of docs/data."""

import json
import re

import pytest
from documented import BLOCK, ROOT, pages

SB3 = "Stable-Baselines3"
SIXTY_FOUR = ("64, of 2,048", "64, of 256", "64 x 16 steps, of 256")  # columns of PPO's table


def measured(name, **chosen):
    """Return the lines of docs/data/<name>.jsonl that have the chosen values."""
    lines = (ROOT / "docs" / "data" / f"{name}.jsonl").read_text().splitlines()
    every = [json.loads(line) for line in lines]
    return [each for each in every if chosen.items() <= each.items()]


def number(text, of="{:.1f}"):
    """Return the last number of a cell such as `48,973 steps/s, 2.72x`."""
    return of.format(float(re.findall(r"[\d,.]+", text)[-1].replace(",", "")))


def span(numbers):
    """Return `lowest to highest`, or the one number."""
    low, high = (f"{edge(numbers):.1f}" for edge in (min, max))
    return low if low == high else f"{low} to {high}"


def races():
    """Return how many times as fast SteadyRL is as Stable-Baselines3 in each race."""
    return span([float(number(e["against ours"], "{}")) for e in measured("race", contestant=SB3)])


def dqn(way):
    """Return the range of DQN's ratios to Stable-Baselines3, with and without priorities."""
    rows = [each for each in measured("dqn") if each["contestant"].startswith(way)]
    return span([float(number(each[f"against {SB3}"])) for each in rows])


def ppo(contestant, of=r"8 env.*|64, .*"):
    """Return the range of PPO's ratios to Stable-Baselines3 over columns of its table."""
    [row] = measured("ppo", contestant=contestant)
    return span([float(number(row[key], "{}")) for key in row if re.fullmatch(of, key)])


def rejax(columns):
    """Return the range of SteadyRL's ratios to rejax over columns of PPO's table."""
    ours, theirs = (measured("ppo", contestant=name)[0] for name in ("kernel compiled", "rejax"))
    ratios = [float(number(row[key], "{}")) for row in (ours, theirs) for key in columns]
    half = len(columns)
    return span([a / b for a, b in zip(ratios[:half], ratios[half:], strict=True)])


def replay(library, batch):
    [row] = measured("replay", replay=library, batch=batch)
    return number(row["ratio"])


def frames(replay):
    [row] = measured("replay_memory", replay=replay)
    return float(number(row["84x84x4 bytes"]))


def eight(way):
    return ppo(way, "8 env.*")


def students():
    """Return after which fractions of the teacher's steps its students exceed 240."""
    [teacher] = measured("results", experiment="lunarlander_ppo", seed=0)
    first = [
        next(int(each["steps"][:-1]) for each in measured("teacher") if float(each[seed]) > 240)
        for seed in ("seed 10", "seed 11", "seed 12")
    ]
    return "{:.0f} to {:.0f} %".format(
        *(1e5 * edge(first) / teacher["steps"] for edge in (min, max))
    )


def figures():
    """Yield (page, text with the figures of docs/data)."""
    yield "README.md", f"One core of an AMD EPYC trains policies {races()} times as fast as with"
    yield "performance.md", f"trained policies come {races()} times as fast as with"
    yield (
        "distillation.md",
        f"students exceed a return of 240 after {students()} of their teacher's",
    )
    [card] = {(each["gpu"], each["processor"]) for each in measured("gpu")}
    cores = " of an ".join(reversed(card[1].split(", ")))
    yield "performance.md", f"on an {card[0]} with {cores}"
    page, [whole] = "comparison.md", measured("dqn", contestant="compiled, uniform")
    xla = whole["steps/s"] / measured("dqn", contestant="rejax")[0]["steps/s"]
    yield page, f"| {SB3} 2.9.2 | {dqn('eager')} eager, {dqn('compiled')} compiled |"
    yield page, f"| | rejax 0.1.3 | {xla:.1f} compiled |"
    yield page, f"| {SB3} 2.9.2 | {eight('sync eager')} eager, {eight('sync compiled')} compiled |"
    yield page, f"| {eight('kernel eager')} eager, {eight('kernel compiled')} compiled |"
    many = "64.*"
    yield page, f"| {ppo('kernel eager', many)} eager, {ppo('kernel compiled', many)} compiled |"
    yield page, f"| | rejax 0.1.3 | {rejax(['8 environments, minibatches of 256'])} compiled |"
    yield page, f"| | rejax 0.1.3 | {rejax(list(SIXTY_FOUR))} compiled |"
    for batch in ("32", "256"):
        yield page, f"| cpprb 11.0 | {replay('cpprb', batch)} |"
        yield page, f"| | Tianshou 2.0.1 | {replay('Tianshou', batch)} |"
    ours, both, one = map(
        frames, ("SteadyRL, uniform", f"{SB3}, default", f"{SB3}, optimize_memory_usage")
    )
    yield page, f"| {both / ours:.1f} times fewer; {one / ours:.1f} with `optimize_memory_usage` |"
    yield page, f"is {both / 1e3:.0f} KB when both stacks are stored and {ours / 1e3:.0f} KB when"


@pytest.mark.parametrize(("page", "text"), [*figures()])
def test_figures_are_those_of_the_data(page, text):
    [found] = [each for each in pages() if each.name == page]
    assert text in " ".join(found.read_text().split())


SPEED = re.compile(r"[\d.,]+ (?:ms|µs|ns|s|steps/s)\b|[\d.]+ times (?:as|the)\b|\d+x\b(?! )")
# What was not measured here.
LIMITS = {
    "20 ms": "the longest block of a fused rollout",
    "150 µs": "the step from which on auto takes async",
    "81.3 s": "SheepRL's own",
    "77.2 s": "SheepRL's own",
}


def speeds(text):
    """Return speeds and times in sentences: outside of blocks, tables and `code`."""
    text = re.sub(r"<!-- from.*?<!-- end -->", "", BLOCK.sub("", text), flags=re.S)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
    return SPEED.findall(re.sub(r"`[^`]*`", "", " ".join(lines)))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_speed_in_a_sentence_is_in_the_data(page):
    sources = " ".join(text for name, text in figures() if name == page.name)
    found = [each for each in speeds(page.read_text()) if each not in LIMITS]
    assert [each for each in found if each not in sources] == [], "add it to figures()"


def test_speeds_in_sentences_are_found():
    text = (
        "It takes 8.5 s, 30 ms at\n1,234 steps/s: 2.5 times as fast; `9 s` in 3 steps.\n| 7 s |\n"
    )
    assert speeds(text) == ["8.5 s", "30 ms", "1,234 steps/s", "2.5 times as"]
