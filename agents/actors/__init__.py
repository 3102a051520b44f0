"""Actors: they choose actions by an agent's weights. Read `greedy.py` first."""
