"""Pairwise covering array: few rows that have every pair of values, built greedily."""

from functools import partial
from itertools import combinations


def pairs_of(row):
    """Return all pairs of (factor, value) in a row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def covering(factors, forbidden=()):
    """Return rows {factor: value} that cover every pair of values except forbidden ones.

    `factors` maps each factor to its values, one of which is compatible with any part of a row.
    """
    forbidden = {frozenset(pair) for pair in forbidden}
    missing = [
        frozenset(((one, a), (other, b)))
        for one, other in combinations(factors, 2)
        for a in factors[one]
        for b in factors[other]
    ]
    missing = dict.fromkeys(pair for pair in missing if pair not in forbidden)
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for factor, values in factors.items():
            if factor not in row:
                best = partial(_new, row, factor, missing=missing.keys(), forbidden=forbidden)
                row[factor] = max(values, key=best)
        for pair in pairs_of(row):
            missing.pop(pair, None)
        rows.append({factor: row[factor] for factor in factors})
    return rows


def _new(row, factor, value, *, missing, forbidden):
    """Return how many missing pairs a value adds to a row; -1 if it adds a forbidden one."""
    pairs = {frozenset((item, (factor, value))) for item in row.items()}
    return -1 if pairs & forbidden else len(pairs & missing)
