"""Vector environments with one interface over all backends. Read `types.py`, then `vector.py`."""
