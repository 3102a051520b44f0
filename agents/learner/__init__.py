"""Losses' frame, optimisers, schedules, counts and metrics. Read `learner.py` first.

The gradient step itself is `agents/engine/eager.py: EagerStep`.
"""
