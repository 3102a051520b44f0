"""A card's memory and time: peaks, limits, utilisation. Read `peak.py` first."""
