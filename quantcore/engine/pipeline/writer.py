"""Writes the results of a job: every layer in every format, and the data for the report and the proof."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quantcore.checkpoint.artifact import write_json
from quantcore.checkpoint.headers import main_dtype, scale_dtype
from quantcore.checkpoint.side_files import LICENSES, copy_side_files
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.quantization import DEFAULT_SHARD_SIZE, parse_size
from quantcore.config.task import Task
from quantcore.engine.blockwise.reported_errors import measured
from quantcore.engine.blockwise.results import Prepared, Solved
from quantcore.engine.calibration.ranges import Activations
from quantcore.engine.data.tokenizer import unpack_tokenizer
from quantcore.engine.model.module_names import with_module_names
from quantcore.engine.pipeline.context import RunContext
from quantcore.engine.runtime.devices import default_device
from quantcore.engine.runtime.shards import put, whole
from quantcore.engine.solvers.rtn import round_to_nearest
from quantcore.engine.verification.expectation import ExpectedDigests
from quantcore.errors import ModelError
from quantcore.events import LayerQuantized, Warned, parse
from quantcore.export import (
    EXPORTERS,
    Container,
    FileContents,
    encoded,
    file_layouts,
    file_of,
    holds_codes,
    json_files,
    layouts_of,
)
from quantcore.export.exporter import max_file_bytes
from quantcore.formats.weight_layout import stored
from quantcore.plan.planner import export_dir
from quantcore.tensors.hashing import Hashing
from quantcore.tensors.qtensor import QLayer, QTensor
from quantcore.tensors.sink import Sink, TensorSink
from quantcore.tensors.source import TORCH_DTYPES, Source


class ResultWriter:
    """Writes solved layers to every export, and keeps the data for the report and the proof.

    Each of the ``ranks`` writes the layers that it solved and its share of the other tensors. A file that only one rank
    can write (``Container``) is left to the first. ``tell`` and ``finish`` gather the data of all ranks.
    """

    def __init__(self, context: RunContext, source: Source, expected: ExpectedDigests) -> None:
        self._context = context
        self.plan = plan = context.plan
        self.source = source
        self.expected = expected
        self.emit = context.emit
        self.ranks = context.ranks
        self.sinks: dict[str, TensorSink] = {}
        self.done: list[LayerQuantized] = []
        self.warnings: list[Warned] = []
        self.edges: list[dict[str, Any]] = []
        self._untold: list[LayerQuantized] = []
        self._written: set[str] = set()
        # The threads of a CPU solve meanwhile.
        self._hashing = Hashing(1 if default_device().type == "cpu" else max(2, torch.get_num_threads()))
        as_they_run = sorted(plan.layers, key=lambda layer: layer.block is None)  # the head after the blocks
        self._places = {layer.name: number for number, layer in enumerate(as_they_run)}
        self._computed = main_dtype(source.tensors)
        self._first_writes_all = any(isinstance(EXPORTERS.get(export), Container) for export in plan.exports)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the files of every export open inside the block, and restore the saved state."""
        task, saved = self._context.task, self._context.saved
        with ExitStack() as stack:
            for export in self.plan.exports:
                sink = open_sink(export, self._context, creates=saved is None)
                if sink is None:
                    continue
                self.sinks[export] = stack.enter_context(closing(sink))
                self._warn(export, (*sink.warnings, *warn_of_one_file(export, task)))
            if saved is not None:
                self.restore(saved)
            yield

    def note(self, prepared: Prepared, index: int | None = None) -> None:
        """Emit and record the warnings, and record the edges of block ``index`` for the report."""
        self.warnings += prepared.warnings
        for warning in prepared.warnings:
            self.emit(warning)
        if prepared.edges is not None:
            edges = prepared.edges.to_dict()
            row = next((row for row in self.edges if row.items() >= edges.items()), None)
            if row is None:
                self.edges.append(row := {"blocks": [], "largest_change_by_folding": 0.0, **edges})
            row["blocks"].append(index)
            row["largest_change_by_folding"] = max(row["largest_change_by_folding"], prepared.fold_error)

    def write_module(self, solved: Solved, module: nn.Module, prepared: Prepared) -> None:
        """Write a solved layer's codes, and the bias of its ``module`` if that is rounded."""
        self.write(solved, prepared.activations)
        self.write_bias(solved.layer, getattr(module, "bias", None))

    def write(self, solved: Solved, activations: dict[LayerPlan, Activations]) -> None:
        """Write one layer's codes, together with its calibrated activation ranges."""
        self.leave(solved.layer)
        if self.ranks.rank == solved.owner:
            self._untold.append(measured(solved))
        if self.ranks.size == 1:
            self.tell()
        if not self.writes(solved.owner):
            return
        ranges = activations.get(solved.layer, Activations())
        self.expected.activations[solved.layer.name] = ranges.as_floats()
        self._write_codes(solved, QLayer(solved.quantized, ranges.inputs, ranges.outputs))

    def rewrite(self, layer: LayerPlan, weight_OI: torch.Tensor, quantized: QTensor) -> None:
        """Replace the parameters of a layer without activations that was written; its errors are measured again.

        That of its output is not known any more.
        """
        for export, sink in self.sinks.items():
            sink.missing.update(layouts_of(EXPORTERS.get(export), layer, self._scale_dtype(f"{layer.name}.weight")))
        solved = Solved(layer, weight_OI, quantized, None)
        self._write_codes(solved, QLayer(quantized))
        place = next(number for number, event in enumerate(self.done) if event.name == layer.name)
        self.done[place] = replace(measured(solved), num_tokens=self.done[place].num_tokens)

    def _write_codes(self, solved: Solved, quantized: QLayer) -> None:
        layer, restored, name = solved.layer, solved.restored_OI, f"{solved.layer.name}.weight"
        self._hashing.add(self.expected.weights, layer.name, restored)
        if not all(map(holds_codes, self.plan.exports)):
            plain = stored(restored.to(TORCH_DTYPES[self.source.tensors[name].dtype]), layer.kind)
            self._hashing.add(self.expected.plain_weights, name, plain)
        for export, sink in self.sinks.items():
            for part, tensor in encoded(EXPORTERS.get(export), layer, quantized, self._scale_dtype(name)).items():
                kept = tensor.to(sink.dtype_of(part))
                if holds_codes(export) and not _is_same(kept, tensor):
                    raise _loses_digits(layer, export)
                sink.write(part, kept)

    def _scale_dtype(self, name: str) -> str:
        return scale_dtype(self.source.tensors[name].dtype, self._computed)

    def leave(self, layer: LayerPlan) -> None:
        """Mark a layer's weight as not to be copied: this rank or another writes its codes."""
        self._written.add(f"{layer.name}.weight")

    def tell(self) -> None:
        """Gather and emit the results of all layers written since the last call."""
        for event in sorted((event for part in self.ranks.gather(self._untold) for event in part), key=self._order):
            self.done.append(event)
            self.emit(event)
        self._untold.clear()

    def write_bias(self, layer: LayerPlan, bias: nn.Parameter | None) -> None:
        """Round the bias, in place, if the layer's config has a spec for it. It is stored as floats, not as codes."""
        name = f"{layer.name}.bias"
        if layer.config.bias is not None and bias is not None:
            rounded = round_to_nearest(whole(bias), layer.config.bias).dequantize()
            put(bias, rounded.to(bias.dtype))
            self._write_shared(name, rounded.to(TORCH_DTYPES[self.source.tensors[name].dtype]))

    def write_changed(self, module: nn.Module, names: dict[str, str]) -> None:
        """Write parameters of ``module`` that are not quantized, but differ from the checkpoint.

        ``names``: their names in the module -> in the checkpoint. Weights of planned layers are written as codes,
        rounded biases have been written already.
        """
        others = self._written | {f"{layer.name}.weight" for layer in self.plan.layers}
        stored_as = self.source.tensors | self.plan.added
        for name, place in sorted(names.items()):
            if place not in others:
                parameter = module.get_parameter(name)
                stored = whole(parameter).to(TORCH_DTYPES[stored_as[place].dtype])
                put(parameter, stored.to(parameter.dtype))  # some modules compute with a wider dtype than is stored
                self._write_shared(place, stored)

    def copy_the_rest(self) -> None:
        """Copy every tensor that was not written yet: embeddings, norms, biases, excluded layers."""
        rest = [name for name in self.source.tensors if name not in self._written]
        for number, name in enumerate(rest):
            if self.writes(number % self.ranks.size):
                self._write_float(name, self.source.read(name))

    def finish(self) -> None:
        """Flush every file to the disk. The first rank then has the expected digests of all ranks."""
        self.tell()
        self._hashing.settle()
        for export in self.plan.exports:
            missing = self.ranks.gather(self._missing(export))
            if (sink := self.sinks.get(export)) is not None:
                sink.missing.intersection_update(*(names for names in missing if names is not None))
                known = len(sink.warnings)
                sink.finish()
                self._warn(export, sink.warnings[known:])
        for other in self.ranks.gather(self.expected.digests)[1:]:
            self.expected.take(other)
        self.done.sort(key=self._order)
        self.ranks.wait()

    def notes(self) -> dict[str, Any]:
        """Flush all files, and return the state that a later process needs to resume here. All ranks call it."""
        self._hashing.settle()
        for sink in self.sinks.values():
            sink.sync()
        expected = ExpectedDigests(self.expected.held_out, self.expected.probe_logits)
        for digests in self.ranks.gather(self.expected.digests):
            expected.take(digests)
        missing = {export: self.ranks.gather(self._missing(export)) for export in self.plan.exports}
        return {
            "expected": expected.digests,
            "layers": [event.to_dict() for event in self.done],
            "warnings": [event.to_dict() for event in self.warnings],
            "edges": self.edges,
            "written": sorted(self._written),
            "missing": {
                export: sorted(set.intersection(*(part for part in parts if part is not None)))
                for export, parts in missing.items()
            },
        }

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Resume from the result of an earlier ``notes``."""
        self._written = set(notes["written"])
        for export, sink in self.sinks.items():
            sink.missing.intersection_update(notes["missing"][export])
        self.edges = notes["edges"]
        self.done = [event for data in notes["layers"] if isinstance(event := parse(data), LayerQuantized)]
        self.warnings = [event for data in notes["warnings"] if isinstance(event := parse(data), Warned)]
        if self.ranks.is_first:
            self.expected.take(notes["expected"])

    def _warn(self, export: str, messages: Iterable[str]) -> None:
        for message in messages:
            self.warnings.append(Warned(export, message))
            self.emit(self.warnings[-1])

    def _missing(self, export: str) -> set[str] | None:
        """Return the names that this rank has not written; None if it does not write this format."""
        return self.sinks[export].missing if export in self.sinks else None

    def writes(self, owner: int) -> bool:
        """Return True if this rank writes the tensors of the rank ``owner``."""
        return self.ranks.is_first if self._first_writes_all else self.ranks.rank == owner

    def _order(self, event: LayerQuantized) -> int:
        return self._places[event.name]

    def _write_shared(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor that all ranks have."""
        self._written.add(name)
        if self.ranks.is_first:
            self._write_float(name, tensor)

    def _write_float(self, name: str, tensor: torch.Tensor) -> None:
        self._hashing.add(self.expected.tensors, name, tensor)
        for sink in self.sinks.values():
            kept = sink.write(name, tensor)
            if kept is not None:
                self._hashing.add(self.expected.kept, name, kept)


def open_sink(export: str, context: RunContext, *, creates: bool) -> TensorSink | None:
    """Return the sink for the tensors of one format; None on ranks that do not write it.

    The first rank makes the files if ``creates``; a resumed job has them already.
    """
    task, plan, ranks, headers = context.task, context.plan, context.ranks, context.model.headers
    target, layouts, exporter = export_dir(context.folder, plan, export), plan.layouts[export], EXPORTERS.get(export)
    if isinstance(exporter, Container):
        if not ranks.is_first:
            return None
        model_config = plan.result_config(headers.config)
        mix = None if task.config.gguf is None else task.config.gguf.mix
        limit = max_file_bytes(task.max_shard_size)
        contents = FileContents(layouts, plan.layers, model_config, task.model_folder, headers.tensors, mix, limit)
        return file_of(exporter).sink(target, contents, creates=creates)
    layouts, parts = file_layouts(exporter, headers.config, layouts)
    tensors, size = parts if holds_codes(export) else headers.tensors, parse_size(task.max_shard_size)
    if not ranks.is_first:
        ranks.wait()
    sink = Sink(target, layouts, size, tensors, creates=creates and ranks.is_first)
    if ranks.is_first:
        ranks.wait()
    return sink


def other_bytes(export: str, context: RunContext) -> int:
    """Return the bytes in the files of one format that are no tensors: headers, padding, a tokenizer, a graph.

    The context's folder, which is empty, gets the files without their tensors.
    """
    sink = open_sink(export, context, creates=True)
    assert sink is not None
    sink.close()
    files = (path for path in context.folder.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files) - sum(
        each.num_bytes for each in context.plan.layouts[export].values()
    )


def warn_of_one_file(export: str, task: Task) -> tuple[str, ...]:
    """Return a warning if a shard size is given for a format that is one file; other formats may have shards."""
    exporter = EXPORTERS.get(export)
    if not isinstance(exporter, Container) or exporter.can_be_split or task.max_shard_size == DEFAULT_SHARD_SIZE:
        return ()
    return (f"{export} is one file: max_shard_size {task.max_shard_size} says nothing there.",)


def write_side_files(context: RunContext) -> None:
    """Write the JSON files that describe the format, config.json first, and copy the files that stay unchanged."""
    task, plan = context.task, context.plan
    model_config = plan.result_config(context.model.headers.config)
    layers, kept = with_module_names(model_config, plan.layers, plan.kept_layers)
    for export in plan.exports:
        target, exporter = export_dir(context.folder, plan, export), EXPORTERS.get(export)
        if isinstance(exporter, Container) and exporter.holds_tokenizer:
            copy_side_files(task.model_folder, target, LICENSES)
            continue
        for name, content in json_files(export, model_config, task.config, layers, kept).items():
            write_json(target / name, content)
        copy_side_files(task.model_folder, target)
        unpack_tokenizer(task.model_folder, target)


def _is_same(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    if kept.dtype == tensor.dtype:
        return True
    return bool(((kept.to(tensor.dtype) == tensor) | tensor.isnan()).all())  # the proof names what is not finite


def _loses_digits(layer: LayerPlan, export: str) -> ModelError:
    return ModelError(
        f"The {export} format stores the scales of {layer.name} in a narrower dtype than they were computed in:"
        " Transformers keeps this layer in float32.",
        code="unsupported_layer",
        hint=f"Exclude it ('*.{layer.name.rpartition('.')[2]}'), or give the model in bfloat16 or float32.",
    )
