"""Searching hyper-parameters: studies and populations. Read `search_space.py` first."""
