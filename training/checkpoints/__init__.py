"""Checkpoints that survive a crash, and exact resume. Read `store.py` first."""
