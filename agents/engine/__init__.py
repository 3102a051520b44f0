"""Execution engines: how a learning step and a policy run. Read `engine.py` first."""
