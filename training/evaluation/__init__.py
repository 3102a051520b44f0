"""Evaluation and videos of the current policy. Read `evaluator.py` first."""
