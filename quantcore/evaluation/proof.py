"""The proof: a fresh process reads the written files and holds them against what was computed.

It shares with the pipeline only the plan. Tensors must be equal bit for bit, logits within ``LOGIT_TOLERANCE``, and the
perplexity on held-out text is measured on what was read back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantcore.calibration.ranges import Activations, quantized_activations
from quantcore.checkpoint.experts import unstack_experts
from quantcore.checkpoint.headers import ModelHeaders, read_tensor_headers
from quantcore.checkpoint.layout import TensorHeader
from quantcore.checkpoint.source import TORCH_DTYPES, Source, TensorSource
from quantcore.errors import ProofError
from quantcore.evaluation.expectation import Expectation, digest, probe_logits
from quantcore.evaluation.perplexity import perplexity
from quantcore.events import Emit, Progress, parse
from quantcore.export import EXPORTERS, Container, Decoder, tensor_name
from quantcore.layer import LayerPlan
from quantcore.plan import Plan, export_dir, resolve
from quantcore.reading import read_model
from quantcore.runtime.devices import default_device, release_freed_memory
from quantcore.runtime.hidden import Hidden
from quantcore.runtime.single import StreamedModel
from quantcore.task import Task
from quantcore.timing import Eta

LOGIT_TOLERANCE = 1e-3
"""Largest |difference| of a logit over the largest |logit|: same weights and kernels give 0, float32 noise less."""


@dataclass(frozen=True)
class Proof:
    """What was seen of one export.

    Every tensor of every export is compared. The model that was read back runs once, from the plan's main export: files
    whose tensors are all equal are the same model. So ``max_logit_difference`` (relative) and ``perplexity`` are None
    for the others, and the perplexity also when no evaluation was wanted.
    """

    export: str
    num_tensors_equal: int
    max_logit_difference: float | None = None
    perplexity: float | None = None


def prove_all(task: Task, folder: Path, scratch: Path, emit: Emit) -> Iterator[Proof]:
    """The fresh process: plan again from the float model's headers, then prove every export in turn.

    Raises ProofError that names what differs.
    """
    headers = read_model(task.model_folder).headers
    plan = resolve(task.config, headers.config, headers.tensors, calibration=task.calibration, exports=task.export)
    expected = Expectation.load(scratch)
    for export in plan.exports:
        written = WrittenCheckpoint(plan, export_dir(folder, plan, export), export, headers)
        proof = Proof(export, written.check(expected))
        if export == plan.main_export:
            difference, value = run_model(plan, headers, written, expected, emit)
            wanted = task.evaluation.num_windows > 0
            proof = replace(proof, max_logit_difference=difference, perplexity=value if wanted else None)
        yield proof


def run_model(
    plan: Plan, headers: ModelHeaders, written: WrittenCheckpoint, expected: Expectation, emit: Emit
) -> tuple[float, float]:
    """(largest relative logit difference, perplexity) of the model in the files. ProofError if the logits differ."""
    model = StreamedModel(
        plan.result_config(headers.config), written.read_float, {*headers.tensors, *plan.added}, plan.block_prefix,
        plan.num_blocks,
        TORCH_DTYPES[headers.main_dtype], default_device(),
    )  # fmt: skip
    hidden = model.embed(expected.held_out_NT)
    run_quantized(model, plan, hidden, written.activations, emit)
    head = {layer: model.find_module(layer.name) for layer in plan.layers_of(None)}
    with model.head() as logits, quantized_activations(head, written.activations):
        probes = probe_logits(logits, hidden.states[: expected.probe_logits.shape[0]])
        value = perplexity(logits, hidden.states, expected.held_out_NT)
    difference = ((probes - expected.probe_logits).abs().max() / expected.probe_logits.abs().max()).item()
    if not difference <= LOGIT_TOLERANCE:
        raise ProofError(
            f"The files give other logits than the model in memory: relative difference {difference:.2e}.",
            code="proof_logits_differ",
            hint=f"Allowed is {LOGIT_TOLERANCE:.0e}. Please report this: the artifact is not handed out.",
        )
    return difference, value


def run_quantized(
    model: StreamedModel, plan: Plan, hidden: Hidden, activations: dict[LayerPlan, Activations], emit: Emit
) -> None:
    """Take ``hidden`` through all blocks with quantized activations where the plan says so."""
    eta = Eta(plan.num_blocks)
    for index in range(plan.num_blocks):
        with model.block(index) as block:
            modules = {layer: model.find_module(layer.name) for layer in plan.layers_of(index)}
            with quantized_activations(modules, activations):
                model.run_block(block, index, hidden)
        emit(Progress("verify", index + 1, plan.num_blocks, "block", eta.after(index + 1)))


class WrittenCheckpoint:
    """A written export: reads floats out of it, through the exporter's decoder if it holds codes."""

    def __init__(self, plan: Plan, folder: Path, export: str, headers: ModelHeaders) -> None:
        exporter = EXPORTERS.get(export)
        self._exporter = exporter
        self._decoder = exporter if isinstance(exporter, Decoder) else None
        self._layers = {f"{layer.name}.weight": layer for layer in plan.layers}
        self._layouts = plan.layouts[export]
        self._export = export
        self._is_own = isinstance(exporter, Container)
        self._source: TensorSource
        if isinstance(exporter, Container):
            config, floats = plan.result_config(headers.config), {**headers.tensors, **plan.added}
            floats = {name: tensor for name, tensor in floats.items() if name not in self._layers}
            self._source = exporter.source(folder, self._layouts, config, floats)
            self._check_layout(self._source.tensors, export)
        else:
            tensors = read_tensor_headers(folder)
            self._check_layout(tensors, export)
            self._source = Source(folder, unstack_experts(tensors))
        self.activations: dict[LayerPlan, Activations] = {}

    def read_float(self, name: str) -> torch.Tensor:
        """The tensor that Transformers would call ``name``: dequantized float32 if the files hold codes of it."""
        if self._decoder is None or name not in self._layers:
            return self._source.read(name)
        layer = self._layers[name]
        parts = self._exporter.layout(layer, "F32")  # the names; the stored dtypes were checked already
        stored = {part: self._source.read(tensor_name(layer.name, part)) for part in parts}
        quantized = self._decoder.decode(layer, stored)
        self.activations[layer] = Activations(quantized.inputs, quantized.outputs)
        return quantized.weight.dequantize()

    def check(self, expected: Expectation) -> int:
        """Compare every tensor with its digest; the number compared."""
        for name, layer in self._layers.items():
            wanted = expected.plain_weights[name] if self._decoder is None else expected.weights[layer.name]
            if digest(self.read_float(name)) != wanted:
                self._differs(name)
            if self._decoder is not None and as_floats(self.activations[layer]) != expected.activations[layer.name]:
                self._differs(f"{layer.name}.input_scale or output_scale")
            release_freed_memory()
        stored = [name for name in expected.tensors if name in self._source]  # all of the plan: see _check_layout
        wanted_of = {**expected.tensors, **expected.kept} if self._is_own else expected.tensors
        for name in stored:
            if digest(self._source.read(name)) != wanted_of[name]:
                self._differs(name)
        return len(self._layers) + len(stored)

    def _check_layout(self, tensors: Mapping[str, TensorHeader], export: str) -> None:
        found = {name: (header.dtype, header.shape) for name, header in tensors.items()}
        planned = {name: (layout.dtype, layout.shape) for name, layout in self._layouts.items()}
        if found != planned:
            odd = sorted(name for name in found.keys() | planned.keys() if found.get(name) != planned.get(name))
            raise ProofError(
                f"The {export} files hold other tensors than planned, first '{odd[0]}'.", code="proof_layout_differs"
            )

    def _differs(self, name: str) -> None:
        raise ProofError(
            f"'{name}' read back from the {self._export} files is not what was computed.",
            code="proof_tensor_differs",
            hint="Please report this: the artifact is not handed out.",
        )


def as_floats(activations: Activations) -> list[list[float]]:
    """Scales and zero points of input and output, for an exact comparison through JSON."""
    parts = [
        part
        for params in (activations.inputs, activations.outputs)
        if params is not None
        for part in (params.scale, params.zero_point)
    ]
    return [[] if part is None else part.flatten().tolist() for part in parts]


def prove_in_fresh_process(task: Task, folder: Path, expected: Expectation, emit: Emit) -> dict[str, Proof]:
    """Run ``python -m quantcore verify`` on ``folder`` and relay its events. Raises ProofError with what it said."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".proof-") as scratch:
        expected.save(Path(scratch))
        (Path(scratch) / "task.json").write_text(task.model_dump_json(), "utf-8")
        command = [sys.executable, "-m", "quantcore", "verify", str(folder), scratch]
        proofs: dict[str, Proof] = {}
        failure: dict[str, Any] = {}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    data = json.loads(line)
                    if data["kind"] == "proof":
                        proofs[data["export"]] = Proof(**{key: data[key] for key in data if key != "kind"})
                    elif data["kind"] == "failed":
                        failure = data
                    else:
                        emit(parse(data))
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0 or failure:
            raise ProofError(
                failure.get("message", f"The proof process ended with status {process.returncode}."),
                code=failure.get("code", "proof_crashed"),
                hint=failure.get("hint", "See the log above."),
                retryable=not failure,
            )
    return proofs


def proof_line(proof: Proof) -> str:
    """The JSON line in which the fresh process reports one export."""
    return json.dumps({"kind": "proof", **asdict(proof)})
