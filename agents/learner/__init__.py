"""The learner: gradients, clipping, optimisers, schedules, all-reduce. Read `learner.py` first."""
