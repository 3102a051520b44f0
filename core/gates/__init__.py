"""Private names of torch and Numba, one module per library. Read `gate.py` first."""
