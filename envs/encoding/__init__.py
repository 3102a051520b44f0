"""From an environment's observations and actions to arrays, and back. Read `spaces.py` first."""
