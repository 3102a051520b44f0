"""Saved policies: found, checked, loaded, used as teachers. Read `policy.py` first."""
