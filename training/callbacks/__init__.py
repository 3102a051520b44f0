"""Users' own code that follows a run: the base class is in `callback.py`."""
