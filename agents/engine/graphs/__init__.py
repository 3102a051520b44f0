"""Learning steps as compiled graphs, cached on disk. Read `trace.py` first."""
