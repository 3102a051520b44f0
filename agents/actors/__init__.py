"""Actors select actions with an agent's weights. Read `greedy.py` first."""
