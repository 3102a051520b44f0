"""The format of what is saved."""

from __future__ import annotations

# Raised whenever a key of the configuration, or a part of what is saved, is added, renamed or read
# otherwise. Other formats are refused (docs/RELIABILITY.md).
FORMAT = 3
