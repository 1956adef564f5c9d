"""THE main path of a job, to read from top to bottom.

It plans, then quantizes block by block (load, run float, prepare, solve, write, run quantized, save), then proves and
seals. If the task has a mix, the scheme of each layer is measured and chosen first: from then on it is a config like
any other. Memory holds one decoder block at a time. Streams of hidden states go from block to block (``JobStreams``):
the calibration windows, the held-out windows through the float block, a few probe windows through the quantized one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quantcore.checkpoint.artifact import building, seal, write_json
from quantcore.checkpoint.folder import find_gguf
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.config.cache_dtypes import not_measured
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.task import Task
from quantcore.engine.blockwise.algorithms import BlockAlgorithms
from quantcore.engine.blockwise.distillation import CodeFiles
from quantcore.engine.blockwise.savepoint import SavePoint
from quantcore.engine.calibration.ranges import quantized_activations
from quantcore.engine.containers.dequantize import open_source
from quantcore.engine.data.fit import warnings_of
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.data.windows import TokenWindows, Windows, token_windows
from quantcore.engine.evaluation import harness
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.provenance import model_identity, provenance
from quantcore.engine.evaluation.text import (
    EvaluationText,
    begin_of_windows,
    document_tokenizer,
    evaluation_text,
    has_own_text,
    hears,
    media_reader,
    overlap,
    with_special_tokens,
)
from quantcore.engine.mixed_precision.command import with_mix
from quantcore.engine.model.kinds import WITH_ENCODER, Kind
from quantcore.engine.model.skeleton import kind_of
from quantcore.engine.pipeline.baseline import Baseline
from quantcore.engine.pipeline.build_report import build_report, write_report
from quantcore.engine.pipeline.context import RunContext, RunLog
from quantcore.engine.pipeline.distill import code_files, distill, divided, num_more_windows
from quantcore.engine.pipeline.file_to_file import Weights, round_files, round_layers
from quantcore.engine.pipeline.given_inputs import read_given_inputs
from quantcore.engine.pipeline.streams import JobStreams, find_gradients, no_gradients, rounded_alone
from quantcore.engine.pipeline.writer import ResultWriter, write_side_files
from quantcore.engine.runtime.devices import default_device, held_memory_bytes, release_freed_memory
from quantcore.engine.runtime.ranks import ALONE, Ranks
from quantcore.engine.runtime.read_ahead import ReadAhead
from quantcore.engine.runtime.sharded import check_all_finite, sharing_ranks
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.engine.runtime.vocabulary import in_parts
from quantcore.engine.runtime.weight_loader import Shards, StoredWeights
from quantcore.engine.transforms.rotation.model_rotation import untie
from quantcore.engine.verification.architecture import prove_tiny_model, prove_window
from quantcore.engine.verification.cache_proof import prove_caches
from quantcore.engine.verification.expectation import ExpectedDigests, probe_logits
from quantcore.engine.verification.fresh_process import prove_in_fresh_process
from quantcore.engine.verification.gate_inputs import Outcome, judge_result, tell_gates
from quantcore.engine.verification.whole_model import may_be_whole
from quantcore.errors import ConfigError, ModelError, at_block
from quantcore.events import Completed, Emit, Eta, PhaseStarted, Progress, Saved, Warned, silence
from quantcore.hub.adapter import with_adapter
from quantcore.hub.download import TOKEN, fetch
from quantcore.importing.grid_search import with_grids
from quantcore.importing.model import Model, read_model
from quantcore.plan.cache_dtypes import check_cache_dtypes
from quantcore.plan.job import with_model_defaults, without_layers
from quantcore.plan.planner import FILE_TO_FILE, Plan, make_plan
from quantcore.plan.workload import NUM_PROBES
from quantcore.report.values import Report
from quantcore.sandbox.opening import Seen, unchanging
from quantcore.tensors.source import TORCH_DTYPES, Source


def run(task: Task, emit: Emit, ranks: Ranks = ALONE) -> Report | None:
    """Quantize, export, prove, seal. Returns the report; ``output_dir`` appears only when everything is done.

    With several ``ranks`` each calls it. The first one emits events and returns the report; the others return None.
    """
    log = RunLog(emit if ranks.is_first else silence)
    log.emit(PhaseStarted("resolve"))
    harness.check(task.evaluation)
    task = ranks.share(with_adapter(fetch(task, log.emit), log.emit, TOKEN.get()) if ranks.is_first else task)
    with unchanging(task.model_folder) as seen:
        model = with_grids(read_model(task.model_folder, task.adapter_folder))
        seen.take(ranks.share(seen.stamps if ranks.is_first else {}))
        log.emit(PhaseStarted("plan"))
        with planned(task, model, log, ranks) as context:
            log.emit(PhaseStarted("gradients" if context.task.config.needs_backward else "quantize"))
            outcome = round_files(context) if context.plan.executor == FILE_TO_FILE else quantize(context)
            log.end_of_quantizing(ranks)
            report = finish(context, outcome, log, seen) if ranks.is_first else None
    if report is not None:
        log.emit(Completed(report.summary.to_dict()))
    return report


@contextmanager
def planned(task: Task, model: Model, log: RunLog, ranks: Ranks) -> Iterator[RunContext]:
    """Yield the planned job, whose folder moves to ``output_dir`` at the end; see ``building``.

    What the plan takes for granted is checked first: that our engine runs the model as Transformers does.
    """
    emit, headers = log.emit, model.headers
    task = with_model_defaults(task, headers.config)
    if not task.file2file:
        _check_kind(task, kind_of(headers.config))
        check_cache_dtypes(task.evaluation, headers)
        uncalled = ranks.share(prove_tiny_model(model, emit) if ranks.is_first else [])
        task, kept = without_layers(task, headers, uncalled)
        if kept:
            emit(Warned("layer_never_called", f"The model's code never calls {', '.join(kept)}: kept as in the model."))
    savepoint = SavePoint.of(task, ranks)
    task, log.mixed = with_mix(task, model, savepoint, emit)
    plan = make_plan(task, headers, num_schemes=len(log.mixed["uniform"]) if log.mixed else 0)
    for message in plan.warnings:
        emit(Warned("plan", message))
    given = ranks.share(read_given_inputs(task, model, plan) if ranks.is_first else None)
    for message in () if given is None else given.warnings:
        emit(Warned("imatrix", message))
    if ranks.is_first and any(layer.is_cached for layer in plan.layers):
        prove_caches(model, emit)
    if ranks.is_first and may_compare_window(model, plan, ranks):
        base = task.model_copy(update={"adapter": None})  # Transformers loads the files, without the adapter
        prove_window(replace(model, adapter=None), BaselineCache(model_identity(base)), emit)
    is_begun, saved = savepoint.is_begun, savepoint.load()
    if saved is not None:
        emit(Saved(saved["next_block"], plan.num_blocks))
    elif is_begun:
        emit(
            Warned(
                "not_resumed",
                f"{task.resume_dir} holds the progress of another job, or of a damaged one: this one"
                " starts at the first block.",
            )
        )
    with building(task.output_dir, savepoint.folder) if ranks.is_first else nullcontext(task.output_dir) as folder:
        yield RunContext(task, model, plan, ranks.share(folder), emit, savepoint, saved, given)


def finish(context: RunContext, outcome: Outcome, log: RunLog, seen: Seen) -> Report:
    """Complete the folder with what is no tensor, verify it, write the report, and seal it."""
    emit, folder = context.emit, context.folder
    emit(PhaseStarted("export"))
    write_side_files(context)
    emit(PhaseStarted("verify"))
    release_freed_memory(of_device=True)
    seen.check()
    proved = prove_in_fresh_process(context.task, folder, outcome.expected, emit)
    results = judge_result(context.task, context.model.headers, context.plan, folder, outcome, proved.proofs)
    report = build_report(context, outcome, proved, results, log)
    write_json(folder / "plan.json", context.plan.to_dict())
    write_report(context.task, folder, report)
    seen.check()
    with_adapter(context.task, silence)
    seal(folder)
    tell_gates(context.task, report, emit)
    return report


def _check_kind(task: Task, kind: Kind) -> None:
    """Raise ConfigError if the task asks for what cannot be done, or measured, with models of this kind."""
    if task.config.tower_quant_config is not None and kind in WITH_ENCODER:
        raise ConfigError(
            f"Texts run the encoder of this model, of the kind '{kind}'. It is only quantized from file to file.",
            code="unsupported_config",
            hint="Give --file2file_quantization, with a scheme that needs no data; or leave the scheme of towers out.",
            field="/config/tower_quant_config",
        )
    if task.config.distills is not None and kind is not Kind.causal:
        raise ConfigError(
            f"distill tunes scales for the prediction of the next token, which a model of the kind '{kind}' does not"
            " make.",
            code="unsupported_config",
            hint="Leave distill out.",
            field="/algo_config",
        )
    if task.evaluation.kv_cache_dtypes and kind is not Kind.causal:
        raise not_measured(f"it is of kind '{kind}', and only causal language models keep a cache")
    asked = "a mix" if task.mix is not None else "tasks" if task.evaluation.tasks else None
    if asked is not None and kind is not Kind.causal:
        raise ConfigError(
            f"This model is of the kind '{kind}', and {asked} can only be measured with causal language models.",
            code="unsupported_config",
            hint=f"Leave {asked} out.",
        )


def quantize(context: RunContext) -> Outcome:
    """Quantize every block, one after the other, and then the head. Resumes after the saved blocks.

    Every rank holds the block, and has its share of the windows, of the layers and of the writing.
    """
    task, original, plan, emit, ranks = context.task, context.model, context.plan, context.emit, context.ranks
    texts = read_texts(task, original.headers, ranks)
    for message in texts.warnings:
        emit(Warned("calibration_text", message))
    source = open_source(original)
    model = stream_model(context, source)
    weights = Weights(source, model.dtype, model.device, context.given)
    calibration, distilled_NT = divided(texts.calibration, num_more_windows(task))
    distilled = None
    algorithms = BlockAlgorithms(task.config, model.dtype, ranks, context.given)
    gradients = None
    if task.config.needs_backward:
        if (reason := no_gradients(model)) is not None:
            emit(Warned("no_gradients", f"{reason}: gptaq takes the place of yaqa."))
        else:
            gradients = find_gradients(context, model, calibration)
        emit(PhaseStarted("quantize"))
    has_media = bool(calibration.media or texts.evaluation.media)
    alone = rounded_alone(model, plan, weights, with_towers=has_media)
    baseline = Baseline(original, texts.evaluation, texts.cache, ranks, is_measured=task.evaluation.num_windows > 0)
    streams = JobStreams.begin(
        context,
        model,
        algorithms,
        calibration,
        texts.evaluation,
        with_held_out=baseline.needs_stream(context.savepoint, context.saved),
        alone=alone,
    )
    if gradients is not None:
        streams.take_gradients(gradients, algorithms)
    first = tuple(sorted(set(texts.calibration.ids_NT[:, 0].tolist())))
    expected = ExpectedDigests(texts.evaluation, torch.empty(0), model=texts.model, calibration_first=first)
    writer = ResultWriter(context, source, expected)
    with writer.opened(), code_files(context) as codes:
        first_block = streams.restore(context.savepoint, context.saved)
        eta = Eta(plan.num_blocks - first_block)
        for index in range(first_block, plan.num_blocks):
            with at_block(index):
                streams.enter(index)
                quantize_block(index, model, plan, algorithms, streams, writer, codes)
                writer.tell()
            left_s = eta.after(index + 1 - first_block)
            emit(Progress("quantize", index + 1, plan.num_blocks, "block", left_s, held_memory_bytes()))
            if streams.save(context.savepoint, index + 1, writer.notes):
                emit(Saved(index + 1, plan.num_blocks))
        if codes is not None:
            streams.logit_probes, distilled = distill(
                context, model, weights, writer, codes, distilled_NT, streams.logit_probes
            )
        with nullcontext() if alone is None else alone():
            quantize_head(model, plan, algorithms, streams, writer)
        round_layers(plan.layers_rounded_alone, weights, writer)
        writer.expected.original_states_NTH = baseline.last_states_NTH(streams.held_out)
        writer.copy_the_rest()
        writer.finish()
    return Outcome(
        writer.expected,
        writer.done,
        writer.warnings,
        writer.edges,
        texts.provenance,
        texts.overlap if plan.needs_calibration and baseline.is_measured else None,
        model.num_shards,
        distilled,
    )


def quantize_block(
    index: int,
    model: StreamedModel,
    plan: Plan,
    algorithms: BlockAlgorithms,
    streams: JobStreams,
    writer: ResultWriter,
    codes: CodeFiles | None = None,
) -> None:
    """Load a block, run it in float, prepare it, solve its layers, write them, run it quantized, drop it."""
    with model.block(index) as block:
        layers = find_modules(model, plan.layers_of(index), writer.ranks)
        at = streams.at(block, index)
        streams.run_float(at)
        prepared = algorithms.prepare(at, layers)
        streams.run_prepared(at)
        for solved in algorithms.solve(at, layers, prepared):
            writer.write_module(solved, layers[solved.layer], prepared)
            if codes is not None:
                codes.write(solved)
        writer.note(prepared, index)
        writer.write_changed(block, {name: model.stored_name(name, index) for name in prepared.changed})
        with quantized_activations(layers, prepared.activations, block):
            streams.run_quantized(at)


def quantize_head(
    model: StreamedModel, plan: Plan, algorithms: BlockAlgorithms, streams: JobStreams, writer: ResultWriter
) -> None:
    """Quantize lm_head if it is planned, and compute the logits of the probes, after the last block."""
    with model.head() as outside:
        if plan.added:
            untie(outside.model)
        ids_NT, probes = writer.expected.held_out.ids_NT[:1], streams.logit_probes
        rotated = algorithms.rotate_outside(outside.model, lambda: outside.embed(ids_NT), outside, probes.states[0])
        writer.write_changed(outside.model, {name: model.stored_name(name) for name in rotated})
        layers = find_modules(model, plan.layers_of(None), writer.ranks)
        prepared = algorithms.prepare_head(layers, outside, streams.learning)
        for solved in algorithms.solve(None, layers, prepared):
            writer.write_module(solved, layers[solved.layer], prepared)
        writer.note(prepared)
        with quantized_activations(layers, prepared.activations, outside.model):
            vocabulary = in_parts(outside, probes.states[0])
            writer.expected.probe_logits = probe_logits(vocabulary, probes.states)


@dataclass(frozen=True)
class Texts:
    """The token windows of a job, their and the model's provenance, and what is odd about the calibration text.

    ``overlap`` is the share of the evaluation text that calibration saw as well.
    """

    calibration: Windows
    evaluation: EvaluationText
    provenance: dict[str, Any]
    overlap: float
    warnings: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """The identity of the float model: see ``provenance``."""
        identity: str = self.provenance["model"]
        return identity

    @property
    def cache(self) -> BaselineCache:
        """The cached results of earlier jobs for the float model."""
        return BaselineCache(self.model)


def read_texts(task: Task, headers: ModelHeaders, ranks: Ranks) -> Texts:
    """Read and tokenize the texts of ``task`` for its model; all ranks get the same windows."""
    windows = ranks.share(read_windows(task) if ranks.is_first else None)
    assert windows is not None
    tokenizer, kind = load_tokenizer(task.model_folder), kind_of(headers.config)
    calibration_NT = with_special_tokens(windows.calibration_NT, kind, tokenizer)
    text = ranks.share(evaluation_text(task, windows, kind))
    origin = ranks.share(provenance(task, calibration_NT, text.ids_NT) if ranks.is_first else {})
    warnings = list(warnings_of(task.calibration, windows, tokenizer, task.model_id or task.model_folder.name))
    seen_NT = calibration_NT.masked_fill(windows.is_placeholder(calibration_NT), -1)  # images differ
    in_both = overlap(seen_NT, text.ids_NT[:, len(begin_of_windows(task.model_folder, tokenizer)) :])
    return Texts(Windows(calibration_NT, windows.calibration_media), text, origin, in_both, tuple(warnings))


def stream_model(context: RunContext, source: Source) -> StreamedModel:
    """Open the float model to run it block by block.

    All ranks share each block if the task or the memory requires it.
    """
    task, plan, headers, device = context.task, context.plan, context.model.headers, default_device()
    sharing = None
    if task.config.needs_whole_blocks is None:
        sharing = sharing_ranks(task.shard_blocks, plan.memory_of_rank(), context.ranks, device)
    reads_ahead = device.type != "cpu" and sharing is None  # a rank reads its own rows of shared blocks
    reader = ReadAhead(source) if reads_ahead else source
    stored = StoredWeights(headers.config, set(headers.tensors), plan.blocks, reader.read, reader.expect)
    shards = None if sharing is None else Shards(sharing, source.read_rows)
    return StreamedModel(stored, TORCH_DTYPES[headers.main_dtype], device, shards)


def may_compare_window(model: Model, plan: Plan, ranks: Ranks) -> bool:
    """Return True if Transformers may load the model whole, and can read its files."""
    reads_floats = model.quantized is None and find_gguf(model.folder) is None
    return plan.runs_model and reads_floats and may_be_whole(plan, plan.footprint.allows_comparison(ranks.size))


def find_modules(model: StreamedModel, layers: tuple[LayerPlan, ...], ranks: Ranks) -> dict[LayerPlan, nn.Module]:
    """Return the module of each planned layer, with its weight in memory.

    Raises ModelError for a module of another class than planned, NumericsError for a weight that holds NaN or infinity.
    Both are raised on all ranks.
    """
    modules: dict[LayerPlan, nn.Module] = {}
    for layer in layers:
        module = model.find_module(layer.name)
        if layer.kind not in {parent.__name__ for parent in type(module).__mro__}:
            raise ModelError(
                f"{layer.name} is a {type(module).__name__}, not the {layer.kind} that its weight looks like.",
                code="unsupported_layer",
                hint=f"Exclude it by its name: '{layer.name}'.",
            )
        modules[layer] = module
    check_all_finite({layer.name: module.get_parameter("weight") for layer, module in modules.items()}, ranks)
    return modules


def read_windows(task: Task) -> TokenWindows:
    """Return calibration and held-out token windows; without held-out ones if the task has its own evaluation text."""
    tokenizer, arguments = load_tokenizer(task.model_folder), task.calibration.chat_template_kwargs
    calibration = task.calibration
    num_samples = calibration.num_samples + num_more_windows(task)
    return token_windows(
        calibration.model_copy(update={"num_samples": num_samples}),
        document_tokenizer(task.model_folder, tokenizer, arguments),
        num_held_out=0 if has_own_text(task) else max(task.evaluation.num_windows, NUM_PROBES),
        held_out_len=task.evaluation.held_out_len,
        media=lambda: media_reader(task.model_folder, tokenizer, arguments),
        hears=lambda: hears(task.model_folder),
    )
