"""``python -m quantcore``: the engine without a server."""

import os
import sys

# Before torch loads its OpenMP: threads that wait shall sleep. Spinning ones take the cores of whoever else works here,
# the proof's process and another job's engine among them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from quantcore.cli import main

sys.exit(main())
