"""The proof: a fresh process reads the written files and compares them with what was computed.

It shares only the plan with the pipeline. Tensors must be equal bit for bit, logits within ``LOGIT_TOLERANCE``, and the
perplexity on held-out text is measured on what was read back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from quantcore.checkpoint.experts import unstack_experts
from quantcore.checkpoint.headers import ModelHeaders, read_tensor_headers
from quantcore.checkpoint.layout import TensorHeader
from quantcore.checkpoint.switched_experts import unstack_switched
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.spec import ScaleType
from quantcore.config.task import Task
from quantcore.engine.calibration.ranges import Activations
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.clipping import Clipping
from quantcore.engine.evaluation.divergence import summarize_both
from quantcore.engine.evaluation.drafts import Drafting, measure_drafts
from quantcore.engine.evaluation.encoders import compare_outputs
from quantcore.engine.evaluation.model import EvaluatedModel, open_model
from quantcore.engine.evaluation.model_pair import ModelPair
from quantcore.engine.model.skeleton import kind_of
from quantcore.engine.runtime.devices import (
    default_device,
    free_memory_bytes,
    held_memory_bytes,
    release_freed_memory,
)
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.engine.runtime.weight_loader import StoredWeights
from quantcore.engine.verification.beginnings import check_beginnings
from quantcore.engine.verification.cache_clipping import check_caches
from quantcore.engine.verification.consumer import check_export, needed_bytes
from quantcore.engine.verification.expectation import ExpectedDigests, difference_of_probes
from quantcore.engine.verification.kv_caches import measure_kv_caches
from quantcore.engine.verification.whole_model import run_whole
from quantcore.errors import ConfigError, NumericsError, ProofError, QuantError
from quantcore.events import Emit, Eta, Progress
from quantcore.export import EXPORTERS, Container, Decoder, file_of, tensor_name
from quantcore.export.unread import unread
from quantcore.importing.model import Model, read_model
from quantcore.plan.planner import FILE_TO_FILE, Plan, export_dir, make_plan
from quantcore.report.behaviour import Behaviour
from quantcore.report.evaluation_result import CacheQuality
from quantcore.report.quality import (
    AnswerQuality,
    ConsumerCheck,
    DraftQuality,
    EncoderQuality,
    Quality,
    Sample,
    TaskResults,
)
from quantcore.tensors.hashing import Hashing
from quantcore.tensors.qtensor import QLayer, is_finite
from quantcore.tensors.source import TORCH_DTYPES, Rows, Source, TensorSource, rows_of


@dataclass(frozen=True)
class Proof:
    """Result of verifying one export.

    Every tensor of every export is compared. ``invalid_numbers`` names layers with invalid scales. The model that was
    read back runs once, from the plan's main export: files whose tensors are all equal are the same model. So the rest
    is None for the other exports, and for ``file2file``: ``max_logit_difference`` (relative), ``clipping`` (the
    activation with the largest clipped share, and that share; ``clipped_by_kind`` has the shares by kind of tensor),
    and if an evaluation was requested ``quality`` (``encoder``, if the model predicts no tokens), ``drafts`` (if it has
    draft layers that Transformers can run), ``kv_caches``, ``answers``, ``behaviour``, ``samples`` and ``harness``.
    ``failed_tasks`` has the reasons for missing results.
    """

    export: str
    num_tensors_equal: int
    invalid_numbers: tuple[str, ...] = ()
    consumer_check: ConsumerCheck = field(default_factory=ConsumerCheck)
    max_logit_difference: float | None = None
    clipping: tuple[str, float] | None = None
    clipped_by_kind: dict[str, float] = field(default_factory=dict)
    quality: Quality | None = None
    encoder: EncoderQuality | None = None
    drafts: DraftQuality | None = None
    kv_caches: tuple[CacheQuality, ...] | None = None
    answers: AnswerQuality | None = None
    behaviour: Behaviour | None = None
    samples: tuple[Sample, ...] | None = None
    harness: TaskResults | None = None
    failed_tasks: dict[str, str] = field(default_factory=dict)

    @property
    def perplexity(self) -> float | None:
        return None if self.quality is None else self.quality.after.token_perplexity.value


class Twin(Protocol):
    """A small twin of a model in a folder: see ``tiny_export.ExportedTinyModel``."""

    @property
    def model(self) -> Model: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def folder(self) -> Path: ...


ExportTwin = Callable[[Task, str, Model, Path], Twin]


def prove_all(
    task: Task, folder: Path, scratch: Path, emit: Emit, export_twin: ExportTwin | None = None
) -> Iterator[Proof]:
    """Prove every export in turn, in the fresh process, which plans again from the float model's headers.

    ``export_twin`` exports a small twin of a model that is too large for the consumer check. Raises ProofError that
    names what differs.
    """
    original = read_model(task.model_folder, task.adapter_folder)
    headers = original.headers
    plan = make_plan(task, headers)
    expected = ExpectedDigests.load(scratch)
    for export in plan.exports:
        written = WrittenCheckpoint(plan, export_dir(folder, plan, export), export, headers, expected)
        if export == plan.main_export and plan.executor != FILE_TO_FILE:
            proof = run_model(task, plan, original, written, expected, emit)
        else:
            proof = compare_tensors(written, emit)
        too_large = why_too_large(plan, export, headers)
        if too_large is None:
            check = check_in_consumer(plan, export_dir(folder, plan, export), export, original, written, emit)
        elif export_twin is None:
            check = ConsumerCheck(not_checked=too_large)
        else:
            check = check_twin(task, export, plan, original, export_twin, too_large, emit)
        yield replace(proof, consumer_check=check)


def compare_tensors(written: WrittenCheckpoint, emit: Emit) -> Proof:
    """Return the proof that every tensor equals what was computed. Raises ProofError that names one that is not."""
    return Proof(written.export, written.check(emit), tuple(written.invalid_numbers))


def run_model(
    task: Task, plan: Plan, original: Model, written: WrittenCheckpoint, expected: ExpectedDigests, emit: Emit
) -> Proof:
    """Run the model in the files, and compare its tensors and logits. Raises ProofError that names what differs."""
    headers, text = original.headers, expected.held_out
    kind = kind_of(headers.config)
    check_beginnings(load_tokenizer(task.model_folder), kind, text.ids_NT, expected.calibration_first)
    release_freed_memory()  # a tokenizer of 262,144 tokens takes 300 MB
    model, clipping = open_written(plan, headers, written, TORCH_DTYPES[headers.main_dtype]), Clipping()
    hidden = model.embed(text)
    model.run(hidden, progress(emit, plan.num_blocks, "block"), clipping)
    check_caches(clipping)
    proof = compare_tensors(written, emit)  # those of the blocks were hashed as they ran
    with model.vocabulary(hidden.states[0]) as vocabulary:
        difference = difference_of_probes(vocabulary, hidden.states, expected.take_probe_logits())
    proof = replace(
        proof, max_logit_difference=difference, clipping=clipping.worst(), clipped_by_kind=clipping.by_kind()
    )
    if expected.original_states_NTH is None:
        return proof
    pair = ModelPair(open_model(original), model, BaselineCache(expected.model))
    proof = compare_predictions(pair, hidden, expected, proof, emit)
    del hidden
    release_freed_memory()
    proof = replace(proof, **measure_kv_caches(task, model, text, emit))
    return replace(proof, **run_whole(task, plan, pair, text, written.folder, emit))


def compare_predictions(pair: ModelPair, hidden: Hidden, expected: ExpectedDigests, proof: Proof, emit: Emit) -> Proof:
    """Add the divergence of the predictions of both models to ``proof``; ``hidden`` is of the quantized one."""
    assert expected.original_states_NTH is not None
    model, original = pair.quantized, pair.original
    kind, text = model.streamed.kind, expected.held_out
    states = [state[None].to(model.streamed.device) for state in expected.original_states_NTH]
    if not kind.predicts_tokens:
        with model.head() as logits, original.head() as original_logits:
            outputs = compare_outputs(kind, text, logits, hidden.states, original_logits, states)
        return replace(proof, encoder=outputs)
    measured = pair.measure(text, hidden.states, states)
    drafts = measure_drafts(Drafting(model, hidden.states), Drafting(original, states), text.ids_NT, emit)
    return replace(proof, quality=summarize_both(measured, text), drafts=drafts)


def open_written(plan: Plan, headers: ModelHeaders, written: WrittenCheckpoint, dtype: torch.dtype) -> EvaluatedModel:
    """Open the quantized model in the files, to compute in ``dtype``; ``headers`` are the float model's."""
    names = {*headers.tensors, *plan.added}
    stored = StoredWeights(plan.result_config(headers.config), names, plan.blocks, written.read_float)
    streamed = StreamedModel(stored, dtype, default_device())
    return EvaluatedModel(streamed, written.rows, plan.layers, written.activations)


def why_too_large(plan: Plan, export: str, headers: ModelHeaders) -> str | None:
    """Explain why another program may not hold the whole export; return None if it may."""
    needed, free = needed_bytes(headers.tensors, plan.layouts[export]), free_memory_bytes(default_device())
    if plan.allows_check and needed <= free:
        return None
    why = f"{free / 1e9:.1f} GB are free" if plan.allows_check else "this job was planned with less"
    return f"Transformers would need {needed / 1e9:.1f} GB for this model, but {why}."


def check_in_consumer(
    plan: Plan, target: Path, export: str, original: Model, written: WrittenCheckpoint, emit: Emit
) -> ConsumerCheck:
    """Apply ``check_export`` to the files in ``target``."""
    ours = partial(open_written, plan, original.headers, written)
    return check_export(export, plan.layers, target, original, ours, emit)


def check_twin(
    task: Task, export: str, plan: Plan, original: Model, export_twin: ExportTwin, too_large: str, emit: Emit
) -> ConsumerCheck:
    """Apply ``check_export`` to a small twin that was exported in the same way."""
    if reason := unread(export, plan.layers):
        return ConsumerCheck(not_checked=reason)
    with tempfile.TemporaryDirectory(prefix="bitfoundry-twin-") as scratch:
        try:
            twin = export_twin(task, export, original, Path(scratch))
        except ConfigError:  # the format cannot hold any: no twin could exist
            return ConsumerCheck(not_checked=too_large)
        except QuantError as error:
            return ConsumerCheck(not_checked=f"{too_large} A small twin was not checked either: {error.message}")
        written = WrittenCheckpoint(twin.plan, twin.folder, export, twin.model.headers)
        check = check_in_consumer(twin.plan, twin.folder, export, twin.model, written, emit)
    if check.not_checked is not None:
        reason = f"{too_large} A small twin was not checked either: {check.not_checked}"
        return ConsumerCheck(not_checked=reason, is_refused=check.is_refused)
    return check.replace(of_twin=True)


def progress(emit: Emit, total: int, unit: str) -> Callable[[int], None]:
    """Return a callback that reports the number of verified ``unit``s, of many about every hundredth."""
    eta, step = Eta(total), max(1, total // 100)

    def report(done: int) -> None:
        if done % step == 0 or done == total:
            emit(Progress("verify", done, total, unit, eta.after(done), held_memory_bytes()))

    return report


class WrittenCheckpoint:
    """A written export: reads floats out of it, through the exporter's decoder if it holds codes.

    What is ``expected`` of a tensor is compared by ``check``. The digest is that of the first time it was read.
    """

    def __init__(
        self, plan: Plan, folder: Path, export: str, headers: ModelHeaders, expected: ExpectedDigests | None = None
    ) -> None:
        exporter = EXPORTERS.get(export)
        self.folder = folder
        self._exporter = exporter
        self._decoder = exporter if isinstance(exporter, Decoder) else None
        self._layers = {f"{layer.name}.weight": layer for layer in plan.layers}
        self._layouts = plan.layouts[export]
        self.export = export
        self._is_own = isinstance(exporter, Container)
        self._source: TensorSource
        if isinstance(exporter, Container):
            config, floats = plan.result_config(headers.config), {**headers.tensors, **plan.added}
            floats = {name: tensor for name, tensor in floats.items() if name not in self._layers}
            self._source = file_of(exporter).source(folder, self._layouts, config, floats)
            self._check_layout(self._source.tensors, export)
        else:
            tensors = unstack_switched(read_tensor_headers(folder), str(headers.config.get("model_type")))
            self._check_layout(tensors, export)
            self._source = Source(folder, unstack_experts(tensors))
        self.activations: dict[LayerPlan, Activations] = {}
        self.invalid_numbers: list[str] = []
        self._expected = expected
        self._read: set[str] = set()
        self._found: dict[str, str] = {}
        self._hashing = Hashing(torch.get_num_threads())

    def read_float(self, name: str) -> torch.Tensor:
        """Return the tensor that Transformers calls ``name``: dequantized float32 if the files hold its codes."""
        is_first, value = name not in self._read, self._decode(name)
        self._read.add(name)
        if is_first and self._expected is not None:
            self._hashing.add(self._found, name, value)
        return value

    def rows(self, name: str) -> Rows:
        """Return a function that reads rows of a matrix; one of codes is decoded whole, once."""
        return rows_of(self.read_float(name)) if name in self._layers else self._source.rows(name)

    def _decode(self, name: str) -> torch.Tensor:
        if self._decoder is None or name not in self._layers:
            return self._source.read(name)
        layer = self._layers[name]
        parts = self._exporter.layout(layer, "F32")  # the names; the stored dtypes were checked already
        device = default_device()  # a large weight takes seconds to decode on the CPU
        stored = {part: self._source.read(tensor_name(layer.name, part)).to(device) for part in parts}
        quantized = self._decoder.decode(layer, stored)
        self.activations[layer] = Activations(quantized.inputs, quantized.outputs)
        restored_OI = quantized.weight.dequantize()
        problems = invalid_numbers(layer, quantized, restored_OI)
        if name not in self._read:
            self.invalid_numbers += problems
        return restored_OI

    def check(self, emit: Emit) -> int:
        """Compare every tensor with its digest; those that were not read yet are read. Returns their number."""
        expected = self._expected
        assert expected is not None
        digests = {**expected.tensors, **expected.kept} if self._is_own else {**expected.tensors}
        for name, layer in self._layers.items():
            digests[name] = expected.plain_weights[name] if self._decoder is None else expected.weights[layer.name]
        names = [*self._layers, *(name for name in expected.tensors if name in self._source)]  # see _check_layout
        report = progress(emit, len(names), "tensor")
        for number, name in enumerate(names, start=1):
            if name not in self._read:
                self.read_float(name)
                release_freed_memory()
            report(number)
        self._hashing.settle()
        for name in names:
            if self._found[name] != digests[name]:
                self._differs(name)
        for layer in self._layers.values() if self._decoder is not None else ():
            if self.activations[layer].as_floats() != expected.activations[layer.name]:
                self._differs(f"{layer.name}.input_scale or output_scale")
        return len(names)

    def _check_layout(self, tensors: Mapping[str, TensorHeader], export: str) -> None:
        written = {name: (header.dtype, header.shape) for name, header in tensors.items()}
        planned = {name: (layout.dtype, layout.shape) for name, layout in self._layouts.items()}
        if written != planned:
            odd = sorted(name for name in written.keys() | planned.keys() if written.get(name) != planned.get(name))
            raise ProofError(
                f"The {export} files contain other tensors than planned, first '{odd[0]}'.", code="proof_layout_differs"
            )

    def _differs(self, name: str) -> None:
        raise ProofError(
            f"'{name}' read back from the {self.export} files differs from what was computed.",
            code="proof_tensor_differs",
            hint="The artifact was withheld. Please report this as a bug.",
        )


def invalid_numbers(layer: LayerPlan, quantized: QLayer, restored_OI: torch.Tensor) -> list[str]:
    """Name the invalid scales of ``layer``: below 0, or so small that they lose digits.

    Raises NumericsError for numbers that are not finite.

    A scale of 0 is right in formats that keep scales as small whole numbers, and e8m0 goes down to 2^-127.
    """
    problems, finite = [], is_finite(restored_OI)
    for what, spec, params in (
        ("weight", layer.weight, quantized.weight.params),
        ("input", layer.config.input_tensors, quantized.inputs),
        ("output", layer.config.output_tensors, quantized.outputs),
    ):
        if spec is None or params is None:
            continue
        numbers = [part for part in (params.scale, params.zero_point, params.global_scale) if part is not None]
        finite = finite and all(bool(part.float().isfinite().all()) for part in numbers)
        may_be_small = spec.scale_type.in_two_levels or spec.scale_type is ScaleType.e8m0
        if (params.scale < (0.0 if may_be_small else torch.finfo(torch.float32).tiny)).any():
            problems.append(f"{layer.name}: the scales of its {what}")
    if not finite:
        raise NumericsError(
            f"The files contain NaN or infinite values for {layer.name}.",
            code="nonfinite_result",
            hint="The artifact was withheld. Please report this as a bug.",
        )
    return problems
