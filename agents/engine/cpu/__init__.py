"""Policies as compiled code on the host. Read `policy.py` first."""
