"""Runs in the environment of another program, without the rest of the engine.

usage: inside_env.py SCRIPT < TASK.json -> one line ``RESULT {json}``

The result is the return value of ``measure(task)`` in ``SCRIPT``, with the script's ``ENVIRONMENT`` for variables that
are not set; or ``missing``, a module that is not installed, or ``error``. Other output of the script goes to stderr.
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
    except Exception as error:  # any error of a program about a model is shown to the user
        result = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
