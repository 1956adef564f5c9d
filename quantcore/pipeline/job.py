"""THE main path, read top to bottom: plan, then block by block load, prepare, solve, write; then prove and seal.

Where a mix is asked for, the scheme of each layer is measured and chosen before: then it is a config like any other.
Memory holds one decoder block at a time. Streams of hidden states walk through the blocks: the calibration windows, the
held-out windows through the float block, a few probe windows through the quantized one.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantcore.blockwise.algorithms import BlockAlgorithms
from quantcore.blockwise.running_block import RunningBlock, Streams
from quantcore.blockwise.savepoint import SavePoint, Stream
from quantcore.calibration.ranges import quantized_activations
from quantcore.calibration.reduction import Span
from quantcore.checkpoint.artifact import building, seal, write_json
from quantcore.checkpoint.folder import find_gguf
from quantcore.checkpoint.opening import Seen, unchanging
from quantcore.checkpoint.source import TORCH_DTYPES
from quantcore.checkpoint.tokenizer import load_tokenizer, tokenize_with
from quantcore.config.layer_plan import LayerPlan
from quantcore.config.task import Task
from quantcore.data.chat import chat_renderer
from quantcore.data.windows import TokenWindows, token_windows
from quantcore.errors import ModelError, at_block
from quantcore.evaluation import harness
from quantcore.evaluation.architecture import prove_twin, prove_window
from quantcore.evaluation.baseline_cache import Originals
from quantcore.evaluation.model import open_model
from quantcore.evaluation.provenance import model_identity, provenance
from quantcore.evaluation.text import EvaluationText, evaluation_text, has_own_text, overlap
from quantcore.events import Completed, Emit, Eta, Event, PhaseStarted, Progress, Warned, silence
from quantcore.hub.download import fetch
from quantcore.mixed_precision.command import with_mix
from quantcore.pipeline.file_to_file import round_files
from quantcore.pipeline.writer import ResultWriter, write_side_files
from quantcore.plan.resolve import FILE_TO_FILE, Plan, plan_job
from quantcore.proof.expectation import Expectation, probe_logits
from quantcore.proof.judging import Outcome, judge_result, tell_gates
from quantcore.proof.verify import may_be_whole, prove_in_fresh_process
from quantcore.reading.dequantize import open_source
from quantcore.reading.model import Model, read_model
from quantcore.report.report import Peaks, build_report, write_report
from quantcore.report.values import Report
from quantcore.rotation.model_rotation import untie
from quantcore.runtime.devices import default_device, held_memory_bytes, peak_memory_bytes, release_freed_memory
from quantcore.runtime.hidden import Hidden
from quantcore.runtime.ranks import ALONE, Ranks
from quantcore.runtime.sharded import check_all_finite, sharing_ranks
from quantcore.runtime.states import states_kept
from quantcore.runtime.streamed_model import Slices, StreamedModel
from quantcore.runtime.workload import NUM_PROBES

EDGE_PROBE_LEN = 32  # tokens with which edges are proven


def run(task: Task, emit: Emit, ranks: Ranks = ALONE) -> Report | None:
    """Quantize, export, prove, seal. Returns the report; ``output_dir`` appears only when all of it is done.

    With several ``ranks`` each calls it. The first one emits events and returns the report; the others return None.
    """
    started = time.monotonic()
    if not ranks.is_first:
        emit = silence
    emit, said = noting_warnings(emit)
    emit(PhaseStarted("resolve"))
    harness.check(task.evaluation)
    task = ranks.share(fetch(task, emit) if ranks.is_first else task)
    with unchanging(task.model_folder) as seen:
        return _run(task, emit, ranks, started, said, seen)


def _run(task: Task, emit: Emit, ranks: Ranks, started: float, said: list[Warned], seen: Seen) -> Report | None:
    """``run`` of a model that is here, whose files are ``seen`` to stay what they are."""
    model = read_model(task.model_folder)
    seen.take(ranks.share(seen.stamps if ranks.is_first else {}))
    headers = model.headers
    emit(PhaseStarted("plan"))
    if ranks.is_first and not task.file2file:
        prove_twin(model, emit)
    savepoint = SavePoint.of(task, ranks)
    task, mixed = with_mix(task, model, savepoint, emit)
    plan = plan_job(task, headers, num_schemes=len(mixed["uniform"]) if mixed else 0)
    for message in plan.warnings:
        emit(Warned("plan", message))
    if ranks.is_first and may_compare_window(model, plan, ranks):
        prove_window(model, Originals(model_identity(task)), emit)
    saved = savepoint.load()
    with ExitStack() as stack:
        folder = task.output_dir
        if ranks.is_first:
            folder = stack.enter_context(building(task.output_dir, savepoint.folder))
        folder = ranks.share(folder)
        emit(PhaseStarted("quantize"))
        work = round_files if plan.executor == FILE_TO_FILE else quantize
        outcome = work(task, model, plan, folder, emit, savepoint, saved)
        peaks_bytes = ranks.gather(peak_memory_bytes())
        if not ranks.is_first:
            return None
        quantized_s = time.monotonic() - started
        emit(PhaseStarted("export"))
        write_side_files(task, headers, plan, folder)
        emit(PhaseStarted("verify"))
        release_freed_memory(of_device=True)
        seen.check()
        proved = prove_in_fresh_process(task, folder, outcome.expected, emit)
        results = judge_result(task, headers, plan, folder, outcome, proved.proofs)
        report = build_report(
            task, plan, outcome, proved.proofs, results, said, mixed=mixed,
            quantize_s=quantized_s, total_s=time.monotonic() - started,
            peaks_bytes=Peaks(peaks_bytes, (held_memory_bytes() or peaks_bytes[0]) + proved.peak_memory_bytes),
        )  # fmt: skip
        write_json(folder / "plan.json", plan.to_dict())
        write_report(task, folder, report)
        seen.check()
        seal(folder)
        tell_gates(task, results, emit)
    emit(Completed(report.summary.to_dict()))
    return report


def noting_warnings(emit: Emit) -> tuple[Emit, list[Warned]]:
    """``emit``, and the warnings that go through it from now on: each of them belongs into the report."""
    said: list[Warned] = []

    def noting(event: Event) -> None:
        if isinstance(event, Warned):
            said.append(event)
        emit(event)

    return noting, said


def quantize(
    task: Task, given: Model, plan: Plan, folder: Path, emit: Emit, savepoint: SavePoint,
    saved: dict[str, Any] | None = None,
) -> Outcome:  # fmt: skip
    """Every block once: run it in float, learn its input ranges, choose codes, write them, run it quantized, drop.

    Every rank holds the block and takes its share of the windows through it, of the layers and of the writing. It goes
    on behind the blocks that were ``saved``.
    """
    ranks = savepoint.ranks
    headers, source = given.headers, open_source(given)
    windows = ranks.share(read_windows(task) if ranks.is_first else None)
    assert windows is not None
    text = ranks.share(evaluation_text(task, windows.held_out_NT))
    device = default_device()
    sharing = sharing_ranks(task.shard_blocks, plan.memory_of_rank(), ranks, device)
    model = StreamedModel(
        headers.config, source.read, set(headers.tensors), plan.block_prefix, plan.num_blocks,
        TORCH_DTYPES[headers.main_dtype], device, None if sharing is None else Slices(sharing, source.read_rows),
        source.expect,
    )  # fmt: skip
    algorithms = BlockAlgorithms(task.config, model.dtype, ranks)
    streams = open_streams(model, plan, algorithms, windows.calibration_NT, folder, ranks)
    probes = algorithms.turned(model.embed(text.ids_NT[:NUM_PROBES]))
    mine = ranks.part(len(text.ids_NT))
    source_of = ranks.share(provenance(task, windows.calibration_NT, text.ids_NT) if ranks.is_first else {})
    known, asked = Originals(source_of["model"]), {"windows": text.ids_NT.tolist()}
    wanted = task.evaluation.num_windows > 0
    walks = wanted and (savepoint.holds(saved, "held_out") if saved else not ranks.share(known.has_states(asked)))
    held_out = model.embed(text.ids_NT[mine.start : mine.stop]) if walks else None
    expected = Expectation(text, torch.empty(0), model=source_of["model"])
    writer = ResultWriter(plan, source, expected, emit, ranks)
    with writer.opened(task, headers, folder, saved):
        walking = walking_states(streams, probes, held_out, mine.start)
        first_block = 0 if saved is None else saved["next_block"]
        if saved is not None:
            savepoint.restore(saved, walking)
        eta = Eta(plan.num_blocks - first_block)
        for index in range(first_block, plan.num_blocks):
            with at_block(index):
                with model.block(index) as block:
                    layers = find_modules(model, plan.layers_of(index), ranks)
                    at = RunningBlock(block, index, streams)
                    model.run_block(block, index, held_out)
                    prepared = algorithms.prepare(at, layers)
                    model.run_block(block, index, streams.probe)
                    for solved in algorithms.solve(at, layers, prepared):
                        writer.write(solved, prepared.activations)
                        writer.write_bias(solved.layer, getattr(layers[solved.layer], "bias", None))
                    writer.note(prepared, index)
                    writer.write_changed(block, {name: model.stored_name(name, index) for name in prepared.changed})
                    with quantized_activations(layers, prepared.activations):
                        model.run_block(block, index, probes)
                        at.leave()
                writer.tell()
            left_s = eta.after(index + 1 - first_block)
            emit(Progress("quantize", index + 1, plan.num_blocks, "block", left_s, held_memory_bytes()))
            if index + 1 < plan.num_blocks and not probes.arguments.pass_values_on:  # those are kept in memory alone
                savepoint.save(index + 1, walking, writer.notes)
        finish_head(model, plan, writer, algorithms, streams, probes, text)
        if held_out is not None:
            last = [state.cpu() for part in ranks.gather(list(held_out.states)) for state in part]
            expected.original_states_NTH = torch.cat(last)
            if ranks.is_first:
                known.keep_states(asked, expected.original_states_NTH)
        elif wanted and ranks.is_first:
            expected.original_states_NTH = known.states(
                asked, lambda: open_model(given).last_states_NTH(text, lambda done: None)
            )
        writer.copy_the_rest()
        writer.finish()
    seen = overlap(windows.calibration_NT, text.ids_NT) if plan.needs_calibration and wanted else None
    num_shards = 1 if sharing is None else sharing.size
    return Outcome(writer.expected, writer.done, writer.warnings, writer.edges, source_of, seen, num_shards)


def may_compare_window(model: Model, plan: Plan, ranks: Ranks) -> bool:
    """Whether Transformers may load the model whole, and knows how to read its files."""
    reads_floats = model.quantized is None and find_gguf(model.folder) is None
    return plan.runs_model and reads_floats and may_be_whole(plan, plan.footprint.allows_comparison(ranks.size))


def open_streams(
    model: StreamedModel, plan: Plan, algorithms: BlockAlgorithms, calibration_NT: torch.Tensor, folder: Path,
    ranks: Ranks,
) -> Streams:  # fmt: skip
    """The hidden states in front of block 0 that the algorithms need; on the disk of ``folder`` if they are many."""
    if not plan.needs_calibration:
        return Streams(None)
    span = Span(len(calibration_NT), ranks)
    mine = span.windows
    states = states_kept(len(mine), plan.memory_of_rank()["activations"] // ranks.size, model.device, folder)
    calibration = algorithms.turned(model.embed(calibration_NT[mine.start : mine.stop], states))
    probe = model.embed(calibration_NT[:1, :EDGE_PROBE_LEN]) if algorithms.needs_probe else None
    return Streams(
        calibration,
        span,
        probe=None if probe is None else algorithms.turned(probe),
        reference=calibration.copy() if algorithms.compares else None,
        through_quantized=algorithms.through_quantized,
    )


def walking_states(streams: Streams, probes: Hidden, held_out: Hidden | None, first: int) -> dict[str, Stream]:
    """All hidden states that go from block to block; the held-out windows are those from number ``first`` on."""
    mine = streams.span.windows.start
    walking = {
        "calibration": (streams.calibration, mine, False),
        "reference": (streams.reference, mine, False),
        "probe": (streams.probe, 0, True),
        "probes": (probes, 0, True),
        "held_out": (held_out, first, False),
    }
    return {name: Stream(hidden.states, start, shared) for name, (hidden, start, shared) in walking.items() if hidden}


def finish_head(
    model: StreamedModel, plan: Plan, writer: ResultWriter, algorithms: BlockAlgorithms, streams: Streams,
    probes: Hidden, text: EvaluationText,
) -> None:  # fmt: skip
    """After the last block: lm_head if planned, and the probes' logits."""
    with model.head() as outside:
        if plan.added:
            untie(outside.model)
        ids_NT = text.ids_NT[:1]
        turned = algorithms.turn_outside(outside.model, lambda: outside.embed(ids_NT), outside, probes.states[0])
        writer.write_changed(outside.model, {name: model.stored_name(name) for name in turned})
        layers = find_modules(model, plan.layers_of(None), writer.ranks)
        prepared = algorithms.prepare_head(layers, outside, streams)
        for solved in algorithms.solve(None, layers, prepared):
            writer.write(solved, prepared.activations)
            writer.write_bias(solved.layer, getattr(layers[solved.layer], "bias", None))
        writer.note(prepared)
        with quantized_activations(layers, prepared.activations):
            writer.expected.probe_logits = probe_logits(outside, probes.states)


def find_modules(model: StreamedModel, layers: tuple[LayerPlan, ...], ranks: Ranks) -> dict[LayerPlan, nn.Module]:
    """The module of each planned layer, its weight in memory. Raises ModelError for a module of another class than
    planned, NumericsError for a weight that holds NaN or infinity, on all ranks if one has it."""
    modules: dict[LayerPlan, nn.Module] = {}
    for layer in layers:
        module = model.find_module(layer.name)
        if layer.kind not in {parent.__name__ for parent in type(module).__mro__}:
            raise ModelError(
                f"{layer.name} is a {type(module).__name__}, not the {layer.kind} that its weight looks like.",
                code="unsupported_layer",
                hint=f"Exclude it, for example with the pattern '*.{layer.name.rpartition('.')[2]}'.",
            )
        modules[layer] = module
    check_all_finite({layer.name: module.get_parameter("weight") for layer, module in modules.items()}, ranks)
    return modules


def read_windows(task: Task) -> TokenWindows:
    """Calibration and held-out token windows of the task's text; none are held out if it is measured on another."""
    tokenizer = load_tokenizer(task.model_folder)
    return token_windows(
        task.calibration,
        tokenize_with(tokenizer),
        num_held_out=0 if has_own_text(task) else max(task.evaluation.num_windows, NUM_PROBES),
        held_out_len=task.evaluation.seq_len,
        separator=tokenizer.eos_token_id,
        render=chat_renderer(tokenizer),
    )
