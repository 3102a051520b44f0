"""The typed configuration and how overrides become it. Read `settings.py` first."""
