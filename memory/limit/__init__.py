"""The memory limit of a run; begin with `limit.py`."""
