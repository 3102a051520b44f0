"""Pictures and films of environments. Read `render.py` first."""
