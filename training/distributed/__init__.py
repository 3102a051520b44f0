"""One run in several processes. Read `comm.py` first."""
