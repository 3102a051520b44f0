"""Policies and the files they are saved in."""
