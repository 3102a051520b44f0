"""Quantiles of Student's t distribution; without torch, for programs about past runs."""

from __future__ import annotations

NORMAL = 1.959964  # the two-sided 95 % quantile

# Quantiles of Student's t for 1, 2, … 9 degrees of freedom; three expansion terms beyond.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def t_quantile(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NORMAL  # Abramowitz and Stegun, 26.7.5
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
