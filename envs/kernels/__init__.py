"""Environments compiled to machine code. Read `kernel.py` and `api.py` first."""
