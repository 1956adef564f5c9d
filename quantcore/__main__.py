"""``python -m quantcore``: the engine without a server."""

import os
import sys

# Before torch loads its OpenMP: threads that wait shall sleep. Spinning ones take the cores of whoever else works here
# (measured: several times the CPU time on a busy machine, nothing gained on an idle one).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from quantcore.cli import main

sys.exit(main())
