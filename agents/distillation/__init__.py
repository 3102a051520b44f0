"""Learning from a teacher (policy distillation). Read `loss.py` first."""
