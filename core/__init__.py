"""What every floor stands on: errors, plain state, metrics and their histories, compiled code.

Read `state.py` first.
"""
