"""One line for a command that is refused: what is wrong with it, and what to write.

Read `explain.py` first.
"""
