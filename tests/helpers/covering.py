"""Few rows in which every pair of values stands: a pairwise covering array, built greedily."""

from functools import partial
from itertools import combinations


def pairs_of(row):
    """Return all pairs of (factor, value) that stand in a row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def covering(factors, forbidden=()):
    """Return rows {factor: value} with every pair of values of two factors but forbidden ones.

    `factors` are lists of values, the first of which go with everything.
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
    """How many pairs that are missing a value brings to a row; -1 if one is forbidden."""
    pairs = {frozenset((item, (factor, value))) for item in row.items()}
    return -1 if pairs & forbidden else len(pairs & missing)
