"""Read finished runs: curves, groups, confidence intervals. Read `past_runs.py` first."""
