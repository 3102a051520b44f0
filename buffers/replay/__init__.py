"""The replay: a ring of timesteps with prioritised n-step samples. Read `buffer.py` first."""
