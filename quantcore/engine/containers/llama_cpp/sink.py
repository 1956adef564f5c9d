"""Writes a GGUF file through llama.cpp's converter: codes are staged first, and laid out once all are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantcore.checkpoint.artifact import STAGED, write_json
from quantcore.checkpoint.headers import read_json
from quantcore.checkpoint.layout import TensorLayout
from quantcore.checkpoint.private_copies import tokenizer_files
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.export import FileContents
from quantcore.export.gguf.converted import run_converter, stacks_of
from quantcore.export.gguf.splitting import is_split, split_gguf
from quantcore.tensors.sink import Sink

FLOATS = ("BF16", "F16", "F32")
NAMED = 3  # tensors that a warning names


class ConvertedSink(Sink):
    """The file of a GGUF artifact whose names, order and metadata are llama.cpp's.

    ``write`` every tensor of the layouts once, then ``finish``. The converter is asked at once if it can convert the
    model: raises ModelError ``unsupported_architecture`` with its reason.
    """

    def __init__(self, file: Path, contents: FileContents, *, name: str, file_type: int, creates: bool) -> None:
        staged = file.parent / STAGED
        super().__init__(staged, contents.layouts, creates=creates)
        self._file, self._max_bytes = file, contents.max_bytes
        self._model = contents.model_config, contents.model_dir
        self._job = {
            "name": name,
            "staged": str(staged),
            "stacks": stacks_of(contents.layouts, contents.tensors),
            "floats": _main_dtype(contents.layouts),
            "file_type_number": file_type,
        }
        left_out = self._run(None)["left_out"]
        self.warnings = _named("The GGUF file of this architecture has no place for", left_out)

    def finish(self) -> None:
        """Lay the staged tensors out as llama.cpp's converter does. Raises as when it was asked.

        The tokenizer's own files lie beside, because Transformers reads few tokenizers from GGUF files.
        """
        super().finish()
        result = self._run(self._file)
        load_tokenizer(self._model[1]).save_pretrained(self._file.parent)
        if is_split((layout.num_bytes for layout in self._layouts.values()), self._max_bytes):
            split_gguf(self._file, self._file.parent, self._max_bytes)
            self._file.unlink()  # what it was made from is still staged
        self.warnings += _named("llama.cpp wants floats in place of codes for", result["widened"])
        self.warnings += _named(
            "llama.cpp's converter computes other values from the checkpoint for", result["computed"]
        )

    def _run(self, out: Path | None) -> dict[str, Any]:
        return _run_with_tokenizer(self._job | {"out": None if out is None else str(out)}, *self._model)


def _run_with_tokenizer(job: Mapping[str, Any], model_config: Mapping[str, Any], model_dir: Path) -> dict[str, Any]:
    """Return the result of a job of ``driver``, for this config.json and the tokenizer in ``model_dir``."""
    with tokenizer_files(model_dir) as files:
        if not (files.folder / "tokenizer.json").exists():  # that of a GGUF input, or of another library
            load_tokenizer(model_dir).save_pretrained(files.folder)
        _drop_code(files.folder / "tokenizer_config.json")
        return run_converter(job, model_config, files.folder)


def _drop_code(file: Path) -> None:
    """Remove the names of a model's own classes: the converter would let Transformers run their code."""
    if file.exists():
        settings = read_json(file, "no_tokenizer")
        settings.pop("auto_map", None)
        write_json(file, settings)


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
