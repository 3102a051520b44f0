"""Policies as machine code on the host. Read `policy.py` first."""
