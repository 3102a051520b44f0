"""Vector environments on one timeline. Read `types.py`, then `vector.py`."""
