"""Rendering environments in a window or to video files. Read `render.py` first."""
