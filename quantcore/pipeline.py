"""THE main path, read top to bottom: plan, then block by block load, prepare, solve, write; then prove and seal.

Memory holds one decoder block at a time. Streams of hidden states walk through the blocks: the calibration windows, the
held-out windows through the float block, a few probe windows through the quantized one.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantcore.blockwise import BlockAlgorithms, Prepared, RunningBlock, Solved, Streams
from quantcore.calibration.chat import chat_renderer
from quantcore.calibration.ranges import Activations, quantized_activations
from quantcore.calibration.text import TokenWindows, token_windows
from quantcore.calibration.tokenizer import load_tokenizer
from quantcore.checkpoint.artifact import LICENSES, building, copy_side_files, seal, write_json
from quantcore.checkpoint.gguf_file import GgufSink
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.checkpoint.hub import fetch
from quantcore.checkpoint.sink import Sink
from quantcore.checkpoint.source import TORCH_DTYPES, Source
from quantcore.dequantizing import open_source
from quantcore.errors import ModelError
from quantcore.evaluation.expectation import Expectation, digest, probe_logits
from quantcore.evaluation.perplexity import perplexity
from quantcore.evaluation.proof import as_floats, prove_in_fresh_process
from quantcore.evaluation.report import build_report
from quantcore.events import Completed, Emit, LayerQuantized, PhaseStarted, Progress, Warned
from quantcore.export import EXPORTERS, Container, encoded, holds_codes
from quantcore.layer import LayerPlan
from quantcore.layouts import stored
from quantcore.plan import Plan, export_dir, resolve
from quantcore.qtensor import QLayer, check_finite
from quantcore.reading import Model, read_model
from quantcore.rotate import untie
from quantcore.runtime.devices import default_device
from quantcore.runtime.hidden import Hidden
from quantcore.runtime.single import StreamedModel
from quantcore.runtime.states import states_kept
from quantcore.solvers.rtn import round_to_nearest
from quantcore.task import Task
from quantcore.timing import Eta

NUM_PROBES = 2
EDGE_PROBE_LEN = 32  # tokens with which edges are proven


@dataclass
class Outcome:
    """What the quantizing pass leaves behind besides the written tensors."""

    expected: Expectation
    layers: list[LayerQuantized]
    warnings: list[Warned]
    perplexity_before: float | None
    edges: list[dict[str, Any]]


def run(task: Task, emit: Emit) -> dict[str, Any]:
    """Quantize, export, prove, seal. Returns the report; ``output_dir`` appears only when all of it is done."""
    started = time.monotonic()
    emit(PhaseStarted("resolve"))
    task = fetch(task, emit)
    model = read_model(task.model_folder)
    headers = model.headers
    emit(PhaseStarted("plan"))
    plan = resolve(
        task.config, headers.config, headers.tensors, calibration=task.calibration, exports=task.export,
        warnings=headers.warnings,
    )  # fmt: skip
    for message in plan.warnings:
        emit(Warned("plan", message))
    with building(task.output_dir) as folder:
        emit(PhaseStarted("quantize"))
        outcome = quantize(task, model, plan, folder, emit)
        quantized_s = time.monotonic() - started
        emit(PhaseStarted("export"))
        write_side_files(task, headers, plan, folder)
        emit(PhaseStarted("verify"))
        proofs = prove_in_fresh_process(task, folder, outcome.expected, emit)
        report = build_report(
            task, plan, outcome.layers, outcome.warnings, outcome.edges, outcome.perplexity_before, proofs,
            quantize_s=quantized_s, total_s=time.monotonic() - started,
        )  # fmt: skip
        write_json(folder / "plan.json", plan.to_dict())
        write_json(folder / "report.json", report)
        seal(folder)
    emit(Completed(report["summary"]))
    return report


def quantize(task: Task, given: Model, plan: Plan, folder: Path, emit: Emit) -> Outcome:
    """Every block once: run it in float, learn its input ranges, choose codes, write them, run it quantized, drop."""
    headers, source = given.headers, open_source(given)
    windows = read_windows(task, headers.config.get("vocab_size"))
    model = StreamedModel(
        headers.config, source.read, set(headers.tensors), plan.block_prefix, plan.num_blocks,
        TORCH_DTYPES[headers.main_dtype], default_device(),
    )  # fmt: skip
    algorithms = BlockAlgorithms(task.config, model.dtype)
    streams = open_streams(model, plan, algorithms, windows, folder)
    held_out = model.embed(windows.held_out_NT)
    probes = algorithms.turned(Hidden(held_out.states[:NUM_PROBES], held_out.arguments).copy())
    if task.evaluation.num_windows == 0:
        held_out = Hidden([], held_out.arguments)
    expected = Expectation(windows.held_out_NT, torch.empty(0))
    quantizer = BlockQuantizer(plan, source, expected, emit)
    with ExitStack() as stack:
        for export in plan.exports:
            sink = open_sink(export, task, headers, plan, folder)
            quantizer.sinks[export] = stack.enter_context(closing(sink))
            for message in sink.warnings:
                quantizer.warnings.append(Warned(export, message))
                emit(quantizer.warnings[-1])
        eta = Eta(plan.num_blocks)
        for index in range(plan.num_blocks):
            with model.block(index) as block:
                layers = find_modules(model, plan.layers_of(index))
                at = RunningBlock(block, index, streams)
                model.run_block(block, index, held_out)
                prepared = algorithms.prepare(at, layers)
                model.run_block(block, index, streams.probe)
                for solved in algorithms.solve(at, layers, prepared):
                    quantizer.write(solved, prepared.activations)
                    quantizer.write_bias(solved.layer, layers[solved.layer])
                quantizer.note(prepared, index)
                quantizer.write_changed(block, {name: model.stored_name(name, index) for name in prepared.changed})
                with quantized_activations(layers, prepared.activations):
                    model.run_block(block, index, probes)
                    at.leave()
            emit(Progress("quantize", index + 1, plan.num_blocks, "block", eta.after(index + 1)))
        before = finish_head(model, plan, quantizer, algorithms, streams, held_out, probes, windows)
        quantizer.copy_the_rest()
        for sink in quantizer.sinks.values():
            sink.finish()
    return Outcome(expected, quantizer.done, quantizer.warnings, before, quantizer.edges)


def open_sink(export: str, task: Task, headers: ModelHeaders, plan: Plan, folder: Path) -> Sink | GgufSink:
    """Where the tensors of one format are written."""
    target, layouts, exporter = export_dir(folder, plan, export), plan.layouts[export], EXPORTERS.get(export)
    if isinstance(exporter, Container):
        return exporter.sink(target, layouts, plan.result_config(headers.config), task.model_folder)
    return Sink(target, layouts, tensors={} if holds_codes(export) else headers.tensors)


def open_streams(
    model: StreamedModel, plan: Plan, algorithms: BlockAlgorithms, windows: TokenWindows, folder: Path
) -> Streams:
    """The hidden states in front of block 0 that the algorithms need; on the disk of ``folder`` if they are many."""
    if not plan.needs_calibration:
        return Streams(None)
    num_windows = len(windows.calibration_NT)
    states = states_kept(num_windows, plan.memory_bytes["activations"], model.device, folder)
    calibration = algorithms.turned(model.embed(windows.calibration_NT, states))
    probe = model.embed(windows.calibration_NT[:1, :EDGE_PROBE_LEN]) if algorithms.needs_probe else None
    return Streams(
        calibration,
        probe=None if probe is None else algorithms.turned(probe),
        reference=calibration.copy() if algorithms.compares else None,
        through_quantized=algorithms.through_quantized,
    )


def finish_head(
    model: StreamedModel, plan: Plan, quantizer: BlockQuantizer, algorithms: BlockAlgorithms, streams: Streams,
    held_out: Hidden, probes: Hidden, windows: TokenWindows,
) -> float | None:  # fmt: skip
    """After the last block: perplexity of the float model (None if not wanted), lm_head if planned, probe logits."""
    with model.head() as outside:
        before = perplexity(outside, held_out.states, windows.held_out_NT) if held_out.states else None
        if plan.added:
            untie(outside.model)
        ids_NT = windows.held_out_NT[:1]
        turned = algorithms.turn_outside(outside.model, lambda: outside.embed(ids_NT), outside, probes.states[0])
        quantizer.write_changed(outside.model, {name: model.stored_name(name) for name in turned})
        layers = find_modules(model, plan.layers_of(None))
        prepared = algorithms.prepare_head(layers, outside, streams)
        for solved in algorithms.solve(None, layers, prepared):
            quantizer.write(solved, prepared.activations)
            quantizer.write_bias(solved.layer, layers[solved.layer])
        quantizer.note(prepared)
        with quantized_activations(layers, prepared.activations):
            quantizer.expected.probe_logits = probe_logits(outside, probes.states)
    return before


class BlockQuantizer:
    """Writes what was chosen to every export, and keeps what the report and the proof need of it."""

    def __init__(self, plan: Plan, source: Source, expected: Expectation, emit: Emit) -> None:
        self.plan = plan
        self.source = source
        self.expected = expected
        self.emit = emit
        self.sinks: dict[str, Sink | GgufSink] = {}
        self.done: list[LayerQuantized] = []
        self.warnings: list[Warned] = []
        self.edges: list[dict[str, Any]] = []
        self._written: set[str] = set()

    def note(self, prepared: Prepared, index: int | None = None) -> None:
        """Say the warnings now, and again in the report, with the edges that block ``index`` has."""
        self.warnings += prepared.warnings
        for warning in prepared.warnings:
            self.emit(warning)
        if prepared.edges is not None:
            told = prepared.edges.to_dict()
            row = next((row for row in self.edges if row.items() >= told.items()), None)
            if row is None:
                self.edges.append(row := {"blocks": [], "largest_change_by_folding": 0.0, **told})
            row["blocks"].append(index)
            row["largest_change_by_folding"] = max(row["largest_change_by_folding"], prepared.fold_error)

    def write(self, solved: Solved, activations: dict[LayerPlan, Activations]) -> None:
        """Write one layer's codes, with what calibration learned beside them in the files."""
        layer, known = solved.layer, activations.get(solved.layer, Activations())
        quantized = QLayer(solved.quantized, known.inputs, known.outputs)
        restored, name = solved.restored_OI, f"{layer.name}.weight"
        model_dtype = self.source.tensors[name].dtype
        self.expected.weights[layer.name] = digest(restored)
        if not all(map(holds_codes, self.plan.exports)):
            plain = stored(restored.to(TORCH_DTYPES[model_dtype]), layer.kind)
            self.expected.plain_weights[name] = digest(plain)
        self.expected.activations[layer.name] = as_floats(known)
        event = measured(solved)
        self.done.append(event)
        self.emit(event)
        for export, sink in self.sinks.items():
            for part, tensor in encoded(EXPORTERS.get(export), layer, quantized, model_dtype).items():
                sink.write(part, tensor.to(sink.dtype_of(part)))
        self._written.add(name)

    def write_bias(self, layer: LayerPlan, module: nn.Module) -> None:
        """Round the bias where the layer's config says so. Its codes are not kept: it stays a float tensor."""
        bias, name = getattr(module, "bias", None), f"{layer.name}.bias"
        if layer.config.bias is not None and bias is not None:
            rounded = round_to_nearest(bias.data, layer.config.bias).dequantize()
            bias.data = rounded.to(bias.dtype)
            self._write_float(name, rounded.to(TORCH_DTYPES[self.source.tensors[name].dtype]))

    def write_changed(self, module: nn.Module, names: dict[str, str]) -> None:
        """Write parameters of ``module`` that are not quantized, but other than in the checkpoint.

        ``names``: what the module and the checkpoint call them. Weights of planned layers are written as codes, rounded
        biases were written already.
        """
        others = self._written | {f"{layer.name}.weight" for layer in self.plan.layers}
        stored_as = self.source.tensors | self.plan.added
        for name, place in sorted(names.items()):
            if place not in others:
                tensor = module.get_parameter(name).data
                self._write_float(place, tensor.to(TORCH_DTYPES[stored_as[place].dtype]))

    def copy_the_rest(self) -> None:
        """Write every tensor that was not written yet as it was: embeddings, norms, biases, excluded layers."""
        for name in self.source.tensors:
            if name not in self._written:
                self._write_float(name, self.source.read(name))

    def _write_float(self, name: str, tensor: torch.Tensor) -> None:
        self.expected.tensors[name] = digest(tensor)
        for sink in self.sinks.values():
            kept = sink.write(name, tensor)
            if kept is not None:
                self.expected.kept[name] = digest(kept)
        self._written.add(name)


def measured(solved: Solved) -> LayerQuantized:
    """How far the codes are from the weight, and the layer's output from what it was on the calibration text."""
    layer, weight = solved.layer, solved.weight_OI.float()
    lost = weight - solved.restored_OI
    error = _ratio(lost.norm(), weight.norm())
    gram = None if solved.stats is None else solved.stats.gram_II
    output_error = None
    if gram is not None:
        power = [((part @ gram.float()) * part).sum().clamp(min=0).sqrt() for part in (lost, weight)]
        output_error = round(_ratio(*power), 6)
    return LayerQuantized(
        name=layer.name,
        block=-1 if layer.block is None else layer.block,
        relative_error=round(error, 6),
        sqnr_db=round(min(-20 * log10(error), 999.0), 2) if error > 0 else 999.0,
        scheme=layer.scheme,
        output_error=output_error,
    )


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> float:
    return (part / whole).item() if whole > 0 else 0.0


def find_modules(model: StreamedModel, layers: tuple[LayerPlan, ...]) -> dict[LayerPlan, nn.Module]:
    """The module of each planned layer, its weight in memory. Raises ModelError for a module of another class than
    planned, NumericsError for a weight that holds NaN or infinity."""
    modules: dict[LayerPlan, nn.Module] = {}
    for layer in layers:
        module = model.find_module(layer.name)
        if layer.kind not in {parent.__name__ for parent in type(module).__mro__}:
            raise ModelError(
                f"{layer.name} is a {type(module).__name__}, not the {layer.kind} that its weight looks like.",
                code="unsupported_layer",
                hint=f"Exclude it, for example with the pattern '*.{layer.name.rpartition('.')[2]}'.",
            )
        check_finite(module.get_parameter("weight"), layer.name)
        modules[layer] = module
    return modules


def read_windows(task: Task, vocab_size: int | None) -> TokenWindows:
    """Calibration and held-out token windows of the task's text. Raises ModelError ``tokenizer_mismatch`` for a token
    that the model has no embedding of."""
    tokenizer = load_tokenizer(task.model_folder)
    windows = token_windows(
        task.calibration,
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        num_held_out=max(task.evaluation.num_windows, NUM_PROBES),
        held_out_len=task.evaluation.seq_len,
        separator=tokenizer.eos_token_id,
        render=chat_renderer(tokenizer),
    )
    largest = max(int(ids.max()) for ids in (windows.calibration_NT, windows.held_out_NT))
    if vocab_size is not None and largest >= vocab_size:
        raise ModelError(
            f"The tokenizer makes token {largest} of the text, and the model knows {vocab_size} tokens.",
            code="tokenizer_mismatch",
            hint="The tokenizer's files belong to another model.",
        )
    return windows


def write_side_files(task: Task, headers: ModelHeaders, plan: Plan, folder: Path) -> None:
    """config.json with the format's quantization_config, and what travels with the model unchanged."""
    kept = tuple(entry.name for entry in plan.kept)
    for export in plan.exports:
        target, exporter = export_dir(folder, plan, export), EXPORTERS.get(export)
        if isinstance(exporter, Container):
            copy_side_files(task.model_folder, target, LICENSES)
            continue
        quantization = exporter.quantization_config(task.config, plan.layers, kept)
        said = {} if quantization is None else {"quantization_config": quantization}
        write_json(target / "config.json", {**plan.result_config(headers.config), **said})
        copy_side_files(task.model_folder, target)
