"""Hyperparameter search: Optuna studies and populations. Read `search_space.py` first."""
