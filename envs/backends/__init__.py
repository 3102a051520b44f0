"""Backends that step N environments: in this process, in worker processes, as a batch, as kernels.

Read `sync.py` first.
"""
