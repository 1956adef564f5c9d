"""The last step of a job with ``distill``: tunes the scales of all blocks, and writes them if that gained."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from quantcore.config.task import Task
from quantcore.engine.blockwise.distillation import CodeFiles, Distilled, Student, divergence, last_states, tune
from quantcore.engine.data.windows import Windows
from quantcore.engine.pipeline.context import RunContext
from quantcore.engine.pipeline.file_to_file import Weights
from quantcore.engine.pipeline.writer import ResultWriter
from quantcore.engine.runtime.devices import default_device, held_memory_bytes
from quantcore.engine.runtime.hidden import Hidden
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.errors import ConfigError
from quantcore.events import Eta, PhaseStarted, Progress, Warned
from quantcore.plan.distillation import NUM_HELD_BACK


def num_more_windows(task: Task) -> int:
    """Return the number of windows that distillation needs beside those of the solver."""
    options = task.config.distills
    return 0 if options is None else options.num_windows + NUM_HELD_BACK


def divided(windows: Windows, num_more: int) -> tuple[Windows, torch.Tensor]:
    """Divide the windows into those of the solver, and the token ids of the last ``num_more``, for distillation."""
    if num_more and any(windows.media):
        raise ConfigError(
            "distill runs the model on text alone, and the calibration data have images or sound.",
            code="unsupported_config",
            hint="Give calibration data of text, or leave distill out.",
            field="/algo_config",
        )
    count = len(windows.ids_NT) - num_more
    return Windows(windows.ids_NT[:count], windows.media[:count]), windows.ids_NT[count:]


@contextmanager
def code_files(context: RunContext) -> Iterator[CodeFiles | None]:
    """Yield the files of codes for distillation, which a job that resumes finds again; None without distillation."""
    task, kept = context.task, context.savepoint.folder
    if task.config.distills is None:
        yield None
    elif kept is not None:
        yield CodeFiles(kept / "codes", default_device())
    else:
        with tempfile.TemporaryDirectory(prefix=".bitfoundry-codes-", dir=task.output_dir.parent) as folder:
            yield CodeFiles(Path(folder), default_device())


def distill(
    context: RunContext,
    model: StreamedModel,
    weights: Weights,
    writer: ResultWriter,
    codes: CodeFiles,
    ids_NT: torch.Tensor,
    probes: Hidden,
) -> tuple[Hidden, Distilled]:
    """Tune the scales on token ids [N, T], of which the last windows are held back; write them if that gained.

    Returns the hidden states of the ``probes`` after the last block of the result. A job that resumes goes on after the
    last saved step, with the same result. Raises ConfigError for a model whose blocks pass values on beside
    their states.
    """
    options, emit, savepoint = context.task.config.distills, context.emit, context.savepoint
    assert options is not None
    emit(PhaseStarted("distill"))
    hidden = model.embed(ids_NT)
    teacher = list(last_states(model, hidden))
    if hidden.arguments.pass_values_on:
        raise ConfigError(
            "Blocks of this model pass values on beside their hidden states, and distill takes gradients through the"
            " states alone.",
            code="unsupported_config",
            hint="Leave distill out.",
            field="/algo_config",
        )
    student = Student(model, writer.plan.layers, codes, weights.source.read)
    num_tuned = options.num_windows
    held_back_NT, held_back = ids_NT[num_tuned:], teacher[num_tuned:]

    def loss() -> float:
        with student.running():
            return divergence(model, last_states(model, model.embed(held_back_NT)), held_back)

    began: list[tuple[int, Eta]] = []

    def tell(done: int, total: int) -> None:
        if not began:
            began.append((done, Eta(total - done)))
        first, eta = began[0]
        emit(Progress("distill", done, total, "step", eta.after(done - first), held_memory_bytes()))

    before = savepoint.once("before_tuning", loss)
    tune(student, options, ids_NT[:num_tuned], teacher[:num_tuned], context.folder, savepoint, tell)
    result = Distilled(before, loss())
    if not result.is_kept:
        message = (
            f"distill gained nothing on {NUM_HELD_BACK} held-back windows (KL {result.kl_before:.4g} before,"
            f" {result.kl_after:.4g} after): the result has the scales of the solver."
        )
        emit(Warned("distill", message))
        return probes, result
    for layer in writer.plan.layers:
        writer.rewrite(layer, weights.read(layer), student.quantized(layer))
    with student.running():
        probes = model.embed(writer.expected.held_out.ids_NT[: len(probes.states)])
        last_states(model, probes)
    return probes, result
