"""An ONNX language model on the disk: the graph first, then its tensors one by one, at offsets known from the plan.

Beside it lies what ONNX Runtime GenAI reads (``export.onnx.genai``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quantcore.checkpoint.artifact import write_json
from quantcore.checkpoint.layout import TensorHeader, TensorLayout
from quantcore.checkpoint.onnx_headers import DATA_NAME, DTYPES, FILE_NAME, read_onnx_headers
from quantcore.engine.containers.onnx_graph import Traced, trace
from quantcore.engine.containers.onnx_nodes import check_installed
from quantcore.export import FileContents
from quantcore.export.onnx.genai import GENAI_CONFIG, genai_config
from quantcore.tensors.sink import OpenFiles, open_for_writing, write_at
from quantcore.tensors.source import TORCH_DTYPES, Source

ALIGNMENT = 4096  # a page: ONNX Runtime maps tensors that start at a page


def sink(folder: Path, contents: FileContents, *, creates: bool = True) -> OnnxSink:
    """See ``ContainerFile``."""
    return OnnxSink(folder, contents, creates=creates)


def source(
    folder: Path,
    layouts: Mapping[str, TensorLayout],
    model_config: Mapping[str, Any],
    floats: Mapping[str, TensorHeader],
) -> Source:
    """See ``ContainerFile``."""
    return Source(folder, read_onnx_headers(folder))


class OnnxSink(OpenFiles):
    """The two files of an ONNX artifact. ``write`` every tensor of the layouts once, then ``finish``.

    Raises ConfigError if a package is missing, ModelError for a model without a graph.
    """

    warnings: tuple[str, ...] = ()

    def __init__(self, folder: Path, contents: FileContents, *, creates: bool = True) -> None:
        check_installed()
        folder.mkdir(parents=True, exist_ok=True)
        layouts = contents.layouts
        self._layouts = dict(layouts)
        self.missing = set(layouts)
        self._offsets: dict[str, int] = {}
        end = 0
        for name, layout in layouts.items():
            self._offsets[name] = end
            end += layout.num_bytes + -layout.num_bytes % ALIGNMENT
        self._handles = [open_for_writing(folder / DATA_NAME, creates=creates)]
        os.ftruncate(self._handles[0], end)
        try:
            traced = trace(contents.model_config, layouts, contents.layers)
            self._save_graph(traced, folder)
            self._save_genai_config(traced, contents, folder)
        except BaseException:
            self.close()
            raise

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which ``write`` takes the tensor called ``name``."""
        return TORCH_DTYPES[self._layouts[name].dtype]

    def write(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Store ``tensor`` (any device) in its planned dtype and shape; each name is written once.

        A tensor without a plan is left out. Returns None: a reader always gets the same tensor back.
        """
        if name not in self._layouts:
            return None  # the model computes it
        layout = self._layouts[name]
        planned = (TORCH_DTYPES[layout.dtype], layout.shape)
        if planned != (tensor.dtype, tuple(tensor.shape)) or name not in self.missing:
            raise RuntimeError(f"{name}: planned {layout}, got {tensor.dtype} {tuple(tensor.shape)}, or written twice")
        write_at(self._handles[0], tensor, self._offsets[name])
        self.missing.discard(name)
        return None

    def _save_graph(self, traced: Traced, folder: Path) -> None:
        """Write model.onnx, with the offsets of the tensors that ``write`` will store."""
        import onnx_ir

        graph = traced.model.graph
        for name, layout in self._layouts.items():
            dtype = onnx_ir.DataType(DTYPES[layout.dtype])
            value = traced.weights.get(name)
            if value is None:  # in the model, but not read by anything
                value = onnx_ir.Value(name=name)
            else:
                graph.inputs.remove(value)
                value = _widened(graph, value, dtype)
            value.shape, value.type = onnx_ir.Shape(layout.shape), onnx_ir.TensorType(dtype)
            value.const_value = onnx_ir.ExternalTensor(
                DATA_NAME, self._offsets[name], layout.num_bytes, dtype, name=name, shape=value.shape, base_dir=folder
            )
            graph.register_initializer(value)
        onnx_ir.save(traced.model, folder / FILE_NAME)

    def _save_genai_config(self, traced: Traced, contents: FileContents, folder: Path) -> None:
        past = [value for value in traced.model.graph.inputs if value.name.startswith("past_key_values.")]
        shapes = {value.name: (value.shape[1], value.shape[3]) for value in past}
        keys, values = ([shapes[name] for name in shapes if name.endswith(kind)] for kind in ("key", "value"))
        if keys != values:
            self.warnings = (f"ONNX Runtime GenAI needs keys and values of one width: no {GENAI_CONFIG} is written.",)
            return
        settings = genai_config(contents.model_config, contents.model_dir, contents.layers, keys)
        write_json(folder / GENAI_CONFIG, settings)


def _widened(graph: Any, value: Any, dtype: Any) -> Any:
    """Return the value that holds the tensor as stored: ``value`` itself, or one of ``dtype`` that is cast to it.

    Rows of an embedding are looked up before they are cast, so that no second copy of it is ever in memory.
    """
    import onnx_ir

    if dtype == value.dtype:
        return value
    narrow = onnx_ir.Value(name=value.name)
    uses = list(value.uses())
    for node, index in uses:
        if node.op_type == "Gather" and index == 0:
            rows = node.outputs[0]
            cast = onnx_ir.node("Cast", [rows], {"to": value.dtype})
            rows.replace_all_uses_with(cast.outputs[0])
            cast.replace_input_with(0, rows)
            rows.type = onnx_ir.TensorType(dtype)
            node.replace_input_with(0, narrow)
            graph.insert_after(node, cast)
    if list(value.uses()):
        cast = onnx_ir.node("Cast", [narrow], {"to": value.dtype})
        value.replace_all_uses_with(cast.outputs[0])
        graph.insert_before(graph[0], cast)
    return narrow
