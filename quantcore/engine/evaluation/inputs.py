"""What an evaluation starts from: the model, the text, and the hidden states of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.data.windows import token_windows
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.evaluation.text import EvaluationText, document_tokenizer, of_held_out, read_text
from quantcore.events import Emit, Eta, PhaseStarted, Progress
from quantcore.hub import download as hub
from quantcore.hub.names import find_local


def find_model(name: str, emit: Emit) -> Path:
    """Return the path of a folder or file, or download a model on the Hub. Raises ModelError ``model_not_found``."""
    if (path := find_local(name)) is not None:
        return path
    emit(PhaseStarted("download"))
    return hub.download(name, hub.resolve(name), emit)


def held_out_text(path: Path, evaluation: EvaluationConfig, *, fewer: bool = False) -> EvaluationText:
    """Return the text of the evaluation; by default the held-out part of the built-in calibration text.

    With ``fewer``, that part may have fewer windows than requested, as a text of its own may.
    """
    tokenizer = load_tokenizer(path)
    if evaluation.source is not None:
        return read_text(evaluation, path)
    windows = token_windows(
        CalibrationConfig(num_samples=1, seq_len=8),
        document_tokenizer(path, tokenizer, {}),
        num_held_out=evaluation.num_windows,
        held_out_len=evaluation.seq_len,
        fewer=fewer,
    )
    return of_held_out(windows, tokenizer)


def states_of_original(
    original: EvaluatedModel, cache: BaselineCache, text: EvaluationText, emit: Emit
) -> list[torch.Tensor]:
    """Return the last hidden states [1, T, H] of each window, from the cache if it has them."""
    states_NTH = cache.states(text.identity, lambda: original.last_states_NTH(text, block_progress(emit, original)))
    return [state[None].to(original.streamed.device) for state in states_NTH]


def block_progress(emit: Emit, model: EvaluatedModel) -> Any:
    """Return a callback that emits the number of blocks done."""
    num_blocks = model.streamed.num_blocks
    eta = Eta(num_blocks)
    return lambda done: emit(Progress("verify", done, num_blocks, "block", eta.after(done)))
