"""Vector environments on one timeline."""
