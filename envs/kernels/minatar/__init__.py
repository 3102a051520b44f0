"""MinAtar's five games as environment kernels. Read `game.py` first."""
