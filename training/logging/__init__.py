"""Metrics to files, TensorBoard, W&B and the terminal. Read `logger.py` first."""
