"""A training run: collect, count, evaluate, log, save, end. Read `collector.py`, then `run.py`."""
