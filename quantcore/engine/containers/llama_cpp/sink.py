"""Writes a GGUF file through llama.cpp's converter: codes are staged first, and laid out once all are there."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantcore.checkpoint.artifact import STAGED, write_json
from quantcore.checkpoint.headers import read_json
from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.checkpoint.private_copies import tokenizer_files
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.model.skeleton import harmless_config
from quantcore.errors import ModelError
from quantcore.export.gguf import converter
from quantcore.tensors.sink import Sink

MODULE = "quantcore.engine.containers.llama_cpp.driver"
FLOATS = ("BF16", "F16", "F32")
NAMED = 3  # tensors that a warning names


class ConvertedSink(Sink):
    """The single file of a GGUF artifact whose names, order and metadata are llama.cpp's.

    ``write`` every tensor of ``layouts`` once, then ``finish``. ``tensors`` are the float checkpoint's. The converter
    is asked at once if it can convert the model: raises ModelError ``unsupported_architecture`` with its reason.
    """

    def __init__(
        self, file: Path, layouts: Mapping[str, TensorLayout], tensors: Mapping[str, TensorHeader],
        model_config: Mapping[str, Any], model_dir: Path, *, name: str, file_type: int, creates: bool,
    ) -> None:  # fmt: skip
        staged = file.parent / STAGED
        super().__init__(staged, layouts, creates=creates)
        self._file = file
        self._model = model_config, model_dir
        self._job = {
            "name": name,
            "staged": str(staged),
            "stacks": stacks_of(layouts, tensors),
            "floats": _main_dtype(layouts),
            "file_type_number": file_type,
        }
        left_out = self._run(None)["left_out"]
        self.warnings = _named("The GGUF file of this architecture has no place for", left_out)

    def finish(self) -> None:
        """Lay the staged tensors out as llama.cpp's converter does. Raises as when it was asked."""
        super().finish()
        result = self._run(self._file)
        self.warnings += _named("llama.cpp wants floats in place of codes for", result["widened"])
        self.warnings += _named(
            "llama.cpp's converter computes other values from the checkpoint for", result["computed"]
        )

    def _run(self, out: Path | None) -> dict[str, Any]:
        return run_converter(self._job | {"out": None if out is None else str(out)}, *self._model)


def run_converter(job: Mapping[str, Any], model_config: Mapping[str, Any], model_dir: Path) -> dict[str, Any]:
    """Return the result of a job of ``driver``, in a process of its own. Raises ModelError with the converter's reason.

    The model has this config.json and the tokenizer in ``model_dir``.
    """
    with tempfile.TemporaryDirectory(prefix="bitfoundry-gguf-") as scratch, tokenizer_files(model_dir) as files:
        if not (files.folder / "tokenizer.json").exists():  # that of a GGUF input, or of another library
            load_tokenizer(model_dir).save_pretrained(files.folder)
        _drop_code(files.folder / "tokenizer_config.json")
        config, _ = harmless_config(model_config)
        (files.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        name = re.sub(r"[^\w.-]+", "-", str(job["name"]).rpartition("/")[2]).strip("-.") or "model"
        folder = Path(scratch, "models", name)
        folder.parent.mkdir()
        folder.symlink_to(files.folder)  # its name becomes metadata: basename, size and finetune
        job_file = Path(scratch) / "job.json"
        job_file.write_text(json.dumps({**job, "model": str(folder)}), encoding="utf-8")
        path = os.pathsep.join(map(str, [*converter.paths(), Path(__file__).parents[4]]))
        command = [sys.executable, "-m", MODULE, str(job_file)]
        environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        answer = job_file.with_suffix(".result")
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    if not result or "error" in result:
        reason = result.get("error") or (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ModelError(
            f"llama.cpp's converter cannot convert this model: {reason}",
            code="unsupported_architecture",
            hint="Remove gguf from the formats. Models that lack a file or a field of their published form are"
            " refused, too.",
        )
    return result


def _drop_code(file: Path) -> None:
    """Remove the names of a model's own classes: the converter would let Transformers run their code."""
    if file.exists():
        settings = read_json(file, "no_tokenizer")
        settings.pop("auto_map", None)
        write_json(file, settings)


def stacks_of(layouts: Mapping[str, TensorLayout], tensors: Mapping[str, TensorHeader]) -> dict[str, Any]:
    """Return the float checkpoint's tensors, by name: their shapes, and the parts that lie in each."""
    stacks: dict[str, Any] = {}
    for name, layout in layouts.items():
        header = tensors.get(name)
        if header is None or header.stack is None:
            shape = layout.shape if header is None else header.shape
            stacks[name] = {"shape": shape, "parts": {name: {}}, "stacked": False}
            continue
        stack, element = header.stack, header.num_bytes // max(1, math.prod(header.shape))
        entry = stacks.setdefault(stack.name, {"shape": stack.shape, "parts": {}, "stacked": True})
        entry["parts"][name] = {
            "begin": (header.begin - stack.begin) // element,
            "num_rows": header.shape[0] * (header.end - header.begin) // header.num_bytes,
            "first": header.rows[0] if header.rows else 0,
            "transposed": header.transposed,
        }
    return stacks


def _main_dtype(layouts: Mapping[str, TensorLayout]) -> str:
    """Return the dtype of most bytes of matrices that are not quantized. The converter gives it to what it computes."""
    sizes = dict.fromkeys(FLOATS, 0)
    for layout in layouts.values():
        if layout.dtype in sizes and len(layout.shape) > 1:
            sizes[layout.dtype] += layout.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _named(what: str, names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (f"{what} {len(names)} tensor(s): {', '.join(names[:NAMED])}{more}.",)
