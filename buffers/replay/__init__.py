"""Replay buffer: a ring of timesteps, sampled as (prioritised) n-step transitions.

Read `buffer.py` first; `timeline.py` has the glossary.
"""
