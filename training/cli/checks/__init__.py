"""Programs that check: `doctor` this machine, `envs` an environment. Read `doctor.py` first."""
