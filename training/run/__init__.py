"""What a run does around each step: counting, saving, evaluating, ending. Read `run.py` first."""
