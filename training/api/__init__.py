"""`steadyrl.train`, `evaluate` and `read` in another program; start at `embedded.py`."""
