"""The report of runs: one HTML file that opens anywhere. Read `page.py` first."""
