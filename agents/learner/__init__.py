"""The learner: gradients, clipping, Adam, schedules, all-reduce. Read `learner.py` first."""
