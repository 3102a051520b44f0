"""Random network distillation: intrinsic rewards for novelty. Read `rnd.py` first."""
