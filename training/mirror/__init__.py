"""A run's copy in object storage, and resuming from it. Read `mirror.py` first."""
