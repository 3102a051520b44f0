"""Machinery for speed: how a learning step and a policy are run. Read `engine.py` first."""
