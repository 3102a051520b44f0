"""Foundations used everywhere: errors, saved state, metrics, timing, JIT, CUDA graphs.

Read `state.py` first.
"""
