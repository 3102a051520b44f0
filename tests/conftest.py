"""One thread for every test: on small networks more of them only wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
