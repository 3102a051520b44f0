"""Where a run's time goes, and whether training becomes slower. Read `watch.py` first."""
