"""Host and GPU memory: budgets, cleaning, the leak detector, the monitor. Read `watch.py` first."""
