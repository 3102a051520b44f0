"""Host and GPU memory: budgets, cleaning, leak detection, monitoring. Read `watch.py` first."""
