"""Many runs: sweeps over values and seeds. Read `sweeper.py` first."""
