"""What a run needs around the loop."""
