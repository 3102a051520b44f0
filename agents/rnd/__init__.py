"""Exploration by random network distillation (RND). Read `rnd.py` first."""
