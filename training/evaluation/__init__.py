"""Evaluation and films of the current policy. Read `evaluator.py` first."""
