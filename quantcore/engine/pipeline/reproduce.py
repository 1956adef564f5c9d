"""Writes ``reproduce.sh``: the exact command that makes the same weights again, and a check of the result."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from quantcore.checkpoint.artifact import STAGED, sha256
from quantcore.config.task import Task
from quantcore.engine.evaluation.provenance import environment

WEIGHTS = ("*.safetensors", "*.gguf", "*.onnx", "*.data")
NOT_SAID: dict[str, Any] = {
    **dict.fromkeys(("output_dir", "resume_dir", "token_on_stdin", "model_dir"), True),
    "adapter": {"folder"},
}

_SCRIPT = """\
#!/bin/sh
# The same weights again: sh reproduce.sh OUTPUT_DIR
# Made with {versions}. Others of these may round otherwise.
set -eu
export OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads}  # sums in another order differ in their last bits
[ $# -eq 1 ] || {{ echo "usage: sh $0 OUTPUT_DIR" >&2; exit 2; }}
{folders}task=$(mktemp)
trap 'rm -f "$task"' EXIT
"${{PYTHON:-python3}}" - "$1" "$MODEL_DIR" "$ADAPTER_DIR" > "$task" <<'END_OF_TASK'
import json, os, sys
task = json.loads({task})
task["output_dir"] = os.path.abspath(sys.argv[1])
if sys.argv[2]:
    task["model_dir"] = os.path.abspath(sys.argv[2])
if sys.argv[3]:
    task["adapter"]["folder"] = os.path.abspath(sys.argv[3])
print(json.dumps(task))
END_OF_TASK
"${{PYTHON:-python3}}" -m quantcore run "$task"
cd "$1"
if sha256sum --check --strict <<'END_OF_SUMS'
{sums}
END_OF_SUMS
then
  exit 0
fi
cat >&2 <<'END_OF_NOTE'
The weights differ in their last bits, or more, from those that were made with:
  {versions}
Here it was:
END_OF_NOTE
"${{PYTHON:-python3}}" -c 'from quantcore.engine.pipeline.reproduce import versions; print(" ", versions())' >&2
echo "Another of these sums in another order. bitfoundry compare shows whether the results differ in quality." >&2
exit 1
"""


def versions() -> str:
    """Return the environment in a line."""
    return ", ".join(f"{name} {value}" for name, value in environment().items())


def script(task: Task, folder: Path) -> str:
    """Return the script for the artifact in ``folder``, whose weights are written.

    A local model is looked for at its old path, or at the path in MODEL_DIR; a local adapter likewise in ADAPTER_DIR.
    """
    task_json = task.model_dump_json(exclude=NOT_SAID, exclude_none=True)
    found = (path for pattern in WEIGHTS for path in folder.rglob(pattern))
    files = sorted(path for path in found if STAGED not in path.relative_to(folder).parts)
    sums = "\n".join(f"{sha256(path)}  {path.relative_to(folder).as_posix()}" for path in files)
    folders = [
        ("MODEL_DIR", None if task.model_id else task.model_folder),
        ("ADAPTER_DIR", None if task.adapter is None or task.adapter.id else task.adapter_folder),
    ]
    return _SCRIPT.format(
        versions=versions(),
        threads=environment()["threads"],
        folders="".join(_folder(name, path) for name, path in folders),
        task=repr(task_json),
        sums=sums,
    )


def _folder(variable: str, path: Path | None) -> str:
    """Return the line that sets a variable to a folder unless it is set; without a folder, one that empties it."""
    if path is None:
        return f"{variable}=\n"
    return f'[ -n "${{{variable}:-}}" ] || {variable}={shlex.quote(str(path))}\n'
