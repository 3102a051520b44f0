"""How N environments are stepped: in this process, in workers, as a batch, as kernels.

Read `sync.py` first.
"""
