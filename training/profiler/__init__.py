"""Traces of updates by torch.profiler. Read `trace.py`."""
