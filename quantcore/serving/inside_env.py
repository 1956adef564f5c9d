"""Runs in the environment of another program, and knows nothing of the rest of the engine.

usage: outside.py SCRIPT < TASK.json -> one line ``RESULT {json}``

What ``measure(task)`` of ``SCRIPT`` returns, with the script's ``ENVIRONMENT`` where nothing else is set; or
``missing``, a module that is not installed, or ``error``. All that is printed meanwhile goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys


def main() -> None:
    task = json.load(sys.stdin)
    script = runpy.run_path(sys.argv[1])
    os.environ.update({name: os.environ.get(name, value) for name, value in script["ENVIRONMENT"].items()})
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = script["measure"](task)
    except ModuleNotFoundError as error:
        result = {"missing": error.name}
    except Exception as error:  # whatever a program does not like about a model is for the user to read
        result = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
