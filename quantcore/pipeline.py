"""THE main path, read top to bottom: plan, then block by block load, collect, solve, write; then prove and seal.

Memory holds one decoder block at a time. Three streams of hidden states walk through the blocks: the calibration
windows and the held-out windows through the float block, a few probe windows through the quantized one.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantcore.algorithms import RTNConfig
from quantcore.calibration.experts import share_ranges
from quantcore.calibration.ranges import Activations, collect_ranges, learned, quantized_activations
from quantcore.calibration.text import TokenWindows, token_windows
from quantcore.calibration.tokenizer import load_tokenizer
from quantcore.checkpoint.artifact import building, copy_side_files, seal, write_json
from quantcore.checkpoint.headers import ModelHeaders, read_local
from quantcore.checkpoint.hub import fetch
from quantcore.checkpoint.sink import Sink
from quantcore.checkpoint.source import TORCH_DTYPES, Source
from quantcore.errors import ModelError
from quantcore.evaluation.expectation import Expectation, digest, probe_logits
from quantcore.evaluation.perplexity import perplexity
from quantcore.evaluation.proof import as_floats, prove_in_fresh_process
from quantcore.evaluation.report import build_report
from quantcore.events import Completed, Emit, LayerQuantized, PhaseStarted, Progress, Warned
from quantcore.export import EXPORTERS, tensor_name
from quantcore.layer import LayerPlan
from quantcore.layouts import canonical, stored
from quantcore.plan import Plan, export_dir, resolve
from quantcore.qtensor import QLayer, check_finite
from quantcore.runtime.devices import default_device
from quantcore.runtime.single import Hidden, StreamedModel
from quantcore.solvers import SOLVERS
from quantcore.task import Task
from quantcore.timing import Eta

NUM_PROBES = 2


@dataclass
class Outcome:
    """What the quantizing pass leaves behind besides the written tensors."""

    expected: Expectation
    layers: list[LayerQuantized]
    warnings: list[Warned]
    perplexity_before: float | None


def run(task: Task, emit: Emit) -> dict[str, Any]:
    """Quantize, export, prove, seal. Returns the report; ``output_dir`` appears only when all of it is done."""
    started = time.monotonic()
    emit(PhaseStarted("resolve"))
    task = fetch(task, emit)
    headers = read_local(task.model_folder)
    emit(PhaseStarted("plan"))
    plan = resolve(task.config, headers.config, headers.tensors, calibration=task.calibration, exports=task.export)
    for message in plan.warnings:
        emit(Warned("pattern_matches_nothing", message))
    with building(task.output_dir) as folder:
        emit(PhaseStarted("quantize"))
        outcome = quantize(task, headers, plan, folder, emit)
        quantized_s = time.monotonic() - started
        emit(PhaseStarted("export"))
        write_side_files(task, headers, plan, folder)
        emit(PhaseStarted("verify"))
        proofs = prove_in_fresh_process(task, folder, outcome.expected, emit)
        report = build_report(
            task, plan, outcome.layers, outcome.warnings, outcome.perplexity_before, proofs,
            quantize_s=quantized_s, total_s=time.monotonic() - started,
        )  # fmt: skip
        write_json(folder / "plan.json", plan.to_dict())
        write_json(folder / "report.json", report)
        seal(folder)
    emit(Completed(report["summary"]))
    return report


def quantize(task: Task, headers: ModelHeaders, plan: Plan, folder: Path, emit: Emit) -> Outcome:
    """Every block once: run it in float, learn its input ranges, choose codes, write them, run it quantized, drop."""
    source = Source(task.model_folder, headers.tensors)
    windows = read_windows(task)
    model = StreamedModel(
        headers.config, source.read, set(headers.tensors), plan.block_prefix, plan.num_blocks,
        TORCH_DTYPES[headers.main_dtype], default_device(),
    )  # fmt: skip
    calibration = model.embed(windows.calibration_NT) if plan.needs_calibration else None
    held_out = model.embed(windows.held_out_NT)
    probes = Hidden(held_out.states[:NUM_PROBES], held_out.arguments)
    if task.evaluation.num_windows == 0:
        held_out = Hidden([], held_out.arguments)
    expected = Expectation(windows.held_out_NT, torch.empty(0))
    quantizer = BlockQuantizer(plan, source, model.dtype, expected, emit)
    with ExitStack() as stack:
        for export in plan.exports:
            quantizer.sinks[export] = stack.enter_context(
                closing(Sink(export_dir(folder, plan, export), plan.layouts[export]))
            )
        eta = Eta(plan.num_blocks)
        for index in range(plan.num_blocks):
            with model.block(index) as block:
                layers = find_modules(model, plan.layers_of(index))
                with collect_ranges(layers) as ranges:
                    model.run_block(block, index, calibration)
                model.run_block(block, index, held_out)
                shared, warnings = share_ranges(ranges)
                quantizer.warn(warnings)
                activations = {layer: learned(layer, shared[layer], model.dtype) for layer in shared}
                quantizer.replace_weights(layers, activations)
                with quantized_activations(layers, activations):
                    model.run_block(block, index, probes)
            emit(Progress("quantize", index + 1, plan.num_blocks, "block", eta.after(index + 1)))
        before = finish_head(model, plan, quantizer, calibration, held_out, probes, windows)
        quantizer.copy_the_rest()
        for sink in quantizer.sinks.values():
            sink.finish()
    return Outcome(expected, quantizer.done, quantizer.warnings, before)


def finish_head(
    model: StreamedModel, plan: Plan, quantizer: BlockQuantizer,
    calibration: Hidden | None, held_out: Hidden, probes: Hidden, windows: TokenWindows,
) -> float | None:  # fmt: skip
    """After the last block: perplexity of the float model (None if not wanted), lm_head if planned, probe logits."""
    with model.head() as logits:
        before = perplexity(logits, held_out.states, windows.held_out_NT) if held_out.states else None
        layers = find_modules(model, plan.layers_of(None))
        with collect_ranges(layers) as ranges:
            for state in calibration.states if calibration and ranges else ():
                logits(state)
        activations = {layer: learned(layer, ranges[layer], model.dtype) for layer in ranges}
        quantizer.replace_weights(layers, activations)
        with quantized_activations(layers, activations):
            quantizer.expected.probe_logits = probe_logits(logits, probes.states)
    return before


class BlockQuantizer:
    """Chooses codes, writes them to every export, and leaves the dequantized weight in the module."""

    def __init__(self, plan: Plan, source: Source, dtype: torch.dtype, expected: Expectation, emit: Emit) -> None:
        self.plan = plan
        self.source = source
        self.dtype = dtype
        self.expected = expected
        self.emit = emit
        self.sinks: dict[str, Sink] = {}
        self.done: list[LayerQuantized] = []
        self.warnings: list[Warned] = []
        self._solver = SOLVERS.get("rtn")(RTNConfig(range_search=False))

    def replace_weights(self, layers: dict[LayerPlan, nn.Module], activations: dict[LayerPlan, Activations]) -> None:
        """Quantize the weight of each module in place, with what calibration learned beside it in the files."""
        for layer, module in layers.items():
            parameter = module.get_parameter("weight")
            weight = canonical(parameter.data, layer.kind)
            known = activations.get(layer, Activations())
            quantized = QLayer(self._solver.solve({layer: weight}, None)[layer], known.inputs, known.outputs)
            restored = quantized.weight.dequantize()
            self.expected.weights[layer.name] = digest(restored)
            self.expected.activations[layer.name] = as_floats(known)
            self._report(layer, weight, restored)
            self._write(layer, quantized)
            parameter.data = stored(restored.to(self.dtype), layer.kind)

    def warn(self, warnings: list[Warned]) -> None:
        """Say them now, and again in the report."""
        self.warnings += warnings
        for warning in warnings:
            self.emit(warning)

    def copy_the_rest(self) -> None:
        """Write every tensor that is not quantized as it was: embeddings, norms, biases, excluded layers."""
        quantized = {f"{layer.name}.weight" for layer in self.plan.layers}
        for name in self.source.tensors:
            if name not in quantized:
                tensor = self.source.read(name)
                self.expected.tensors[name] = digest(tensor)
                for sink in self.sinks.values():
                    sink.write(name, tensor)

    def _write(self, layer: LayerPlan, quantized: QLayer) -> None:
        for export, sink in self.sinks.items():
            for part, tensor in EXPORTERS.get(export).encode(layer, quantized).items():
                name = tensor_name(layer.name, part)
                sink.write(name, tensor.to(TORCH_DTYPES[self.plan.layouts[export][name].dtype]))

    def _report(self, layer: LayerPlan, weight: torch.Tensor, restored: torch.Tensor) -> None:
        signal = weight.float().norm()
        error = ((weight.float() - restored).norm() / signal).item() if signal > 0 else 0.0
        sqnr_db = -20 * torch.log10(torch.tensor(error)).item() if error > 0 else float("inf")
        block = -1 if layer.block is None else layer.block
        event = LayerQuantized(layer.name, block, round(error, 6), round(min(sqnr_db, 999.0), 2), layer.scheme)
        self.done.append(event)
        self.emit(event)


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


def read_windows(task: Task) -> TokenWindows:
    """Calibration and held-out token windows of the task's text."""
    tokenizer = load_tokenizer(task.model_folder)
    return token_windows(
        task.calibration,
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        num_held_out=max(task.evaluation.num_windows, NUM_PROBES),
        held_out_len=task.evaluation.seq_len,
        separator=tokenizer.eos_token_id,
    )


def write_side_files(task: Task, headers: ModelHeaders, plan: Plan, folder: Path) -> None:
    """config.json with the format's quantization_config, and what travels with the model unchanged."""
    kept = tuple(entry.name for entry in plan.kept)
    for export in plan.exports:
        target = export_dir(folder, plan, export)
        quantization = EXPORTERS.get(export).quantization_config(task.config, plan.layers, kept)
        write_json(target / "config.json", {**headers.config, "quantization_config": quantization})
        copy_side_files(task.model_folder, target)
