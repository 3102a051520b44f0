"""What `steadyrl.train` does inside another program; start at `embedded.py`."""
