"""Learning steps as compiled graphs that are kept on disk. Read `trace.py` first."""
