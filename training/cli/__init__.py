"""The programs of the command line. Read `main.py` first."""
