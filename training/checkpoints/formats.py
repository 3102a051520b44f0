"""The format version of checkpoints and policies."""

from __future__ import annotations

# Raise it whenever a configuration key or a saved part is added, renamed or read differently.
# Other versions are refused (docs/long-runs.md).
FORMAT = 12
