"""Finished runs read again: curves, groups, confidence intervals. Read `past_runs.py` first."""
