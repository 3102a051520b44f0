"""Encoding of observations and actions as arrays, episode statistics. Read `spaces.py` first."""
