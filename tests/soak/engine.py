"""The engine of the soak: the stub for models that have a ``stub.json``, the real one for all others."""

import json
import runpy
import sys
from pathlib import Path

STUB = Path(__file__).parents[1] / "support" / "stub_engine.py"

if __name__ == "__main__":
    task = json.loads(Path(sys.argv[-1]).read_text())
    if (Path(task["model_dir"]) / "stub.json").exists():
        runpy.run_path(str(STUB), run_name="__main__")
    else:
        sys.argv[:] = ["quantcore", "run", sys.argv[-1]]
        runpy.run_module("quantcore", run_name="__main__", alter_sys=True)
