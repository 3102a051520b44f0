"""The learner: gradient, clipping, Adam, schedules, several ranks. Read `learner.py` first."""
