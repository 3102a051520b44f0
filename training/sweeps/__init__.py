"""Sweeps over values and seeds. Read `sweeper.py` first."""
